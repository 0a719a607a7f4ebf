{{- define "shoal.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "shoal.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "shoal.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* KubeRay derives names of services and pods from it, and takes 50 characters of these. */}}
{{- define "shoal.rayName" -}}
{{- printf "%s-ray" (include "shoal.fullname" . | trunc 24 | trimSuffix "-") -}}
{{- end -}}

{{/* Called with a dict: root, component. */}}
{{- define "shoal.selectorLabels" -}}
app.kubernetes.io/name: {{ include "shoal.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "shoal.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{ include "shoal.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* Called with a dict: root, image (repository, tag). */}}
{{- define "shoal.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- $registry := trimSuffix "/" .root.Values.images.registry -}}
{{- if $registry -}}{{ $registry }}/{{ end -}}
{{- .image.repository -}}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end -}}

{{/* Service links would set variables of Shoal's own names, as SHOAL_PORT, to something else: no pod has them. */}}
{{- define "shoal.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What the names of Secrets are: the given ones, or those that templates/secrets.yaml makes. */}}
{{- define "shoal.authSecret" -}}
{{- default (printf "%s-auth" (include "shoal.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "shoal.raySecret" -}}
{{- default (printf "%s-token" (include "shoal.rayName" .)) .Values.rayCluster.auth.existingSecret -}}
{{- end -}}

{{- define "shoal.postgresName" -}}
{{- printf "%s-postgresql" (include "shoal.fullname" .) -}}
{{- end -}}

{{- define "shoal.postgresSecret" -}}
{{- default (include "shoal.postgresName" .) .Values.database.embedded.existingSecret -}}
{{- end -}}

{{- define "shoal.redisName" -}}
{{- printf "%s-redis" (include "shoal.fullname" .) -}}
{{- end -}}

{{- define "shoal.redisSecret" -}}
{{- default (include "shoal.redisName" .) .Values.rayCluster.gcsFaultTolerance.existingSecret -}}
{{- end -}}

{{- define "shoal.isDatabaseExternal" -}}
{{- if or .Values.database.external.url .Values.database.external.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "shoal.isDatabaseEmbedded" -}}
{{- if and .Values.controlPlane.enabled .Values.database.embedded.enabled (not (include "shoal.isDatabaseExternal" .)) -}}true{{- end -}}
{{- end -}}

{{/* A Secret that is made once and kept: what stands in the cluster already is taken over. Called with a dict: root,
name, component, keys. */}}
{{- define "shoal.keptSecret" -}}
{{- $there := dig "data" dict (lookup "v1" "Secret" .root.Release.Namespace .name | default dict) -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  labels: {{- include "shoal.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
type: Opaque
data:
  {{- range .keys }}
  {{ . }}: {{ get $there . | default (randAlphaNum 48 | b64enc) | quote }}
  {{- end }}
{{- end -}}

{{/* Where connectors find the control plane. */}}
{{- define "shoal.serverUrl" -}}
{{- if .Values.connector.server -}}
{{- .Values.connector.server -}}
{{- else -}}
{{- printf "%s://%s.%s.svc:%v" (ternary "https" "http" (ne .Values.controlPlane.tls.existingSecret "")) (include "shoal.fullname" .) .Release.Namespace .Values.controlPlane.service.port -}}
{{- end -}}
{{- end -}}

{{- define "shoal.publicUrl" -}}
{{- if .Values.controlPlane.publicUrl -}}
{{- .Values.controlPlane.publicUrl -}}
{{- else if .Values.controlPlane.ingress.enabled -}}
https://{{ .Values.controlPlane.ingress.host }}
{{- end -}}
{{- end -}}

{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Called with the id that everything of the pod runs as. */}}
{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Of a bucket's credentials and address, as boto3 reads them; for the control plane and for nodes alike. */}}
{{- define "shoal.objectStoreEnv" -}}
{{- with .Values.objectStore }}
{{- if .endpoint }}
- name: AWS_ENDPOINT_URL_S3
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .region }}
- name: AWS_DEFAULT_REGION
  value: {{ .region | quote }}
{{- end }}
{{- if .existingSecret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .accessKeyIdKey }}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretAccessKeyKey }}}
{{- end }}
{{- if .caConfigMap }}
- name: AWS_CA_BUNDLE
  value: /etc/shoal/object-store-ca/ca.crt
{{- end }}
{{- $root := . }}
{{- range .profiles }}
- name: SHOAL_STORAGE_{{ .name }}_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ $root.accessKeyIdKey }}}
- name: SHOAL_STORAGE_{{ .name }}_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ $root.secretAccessKeyKey }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.objectStoreMount" -}}
{{- if .Values.objectStore.caConfigMap }}
- name: object-store-ca
  mountPath: /etc/shoal/object-store-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "shoal.objectStoreVolume" -}}
{{- with .Values.objectStore.caConfigMap }}
- name: object-store-ca
  configMap:
    name: {{ . }}
{{- end }}
{{- end -}}

{{/* Variables of a map of settings. Called with a dict: prefix, settings. Numbers come as floats: no exponents. */}}
{{- define "shoal.settingsEnv" -}}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings }}
- name: {{ $prefix }}{{ upper $name }}
  value: {{ include "shoal.plain" $value | quote }}
{{- end }}
{{- end -}}

{{/* A quantity of Kubernetes as a number, down to thousandths. */}}
{{- define "shoal.amount" -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $units := merge $binary (dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15) -}}
{{- $text := include "shoal.plain" . -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[a-zA-Z]*$" $text)) | printf "%.3f" -}}
{{- end -}}

{{- define "shoal.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}
