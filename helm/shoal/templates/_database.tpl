{{- define "shoal.isRedisEmbedded" -}}
{{- with .Values.rayCluster }}
{{- if and .enabled .gcsFaultTolerance.enabled (not .gcsFaultTolerance.redisAddress) -}}true{{- end -}}
{{- end }}
{{- end -}}

{{- define "shoal.databaseEnv" -}}
{{- if include "shoal.isDatabaseEmbedded" . }}
- name: SHOAL_DATABASE_URL
  value: postgresql://shoal@{{ include "shoal.postgresName" . }}:5432/shoal
- name: PGPASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "shoal.postgresSecret" . }}, key: password}
{{- else }}
- name: SHOAL_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-database" (include "shoal.fullname" .)) .Values.database.external.existingSecret }}
      key: {{ .Values.database.external.existingSecretKey }}
{{- end }}
{{- end -}}

{{/* The volume claim of a database within the chart; called with its `storage` values. */}}
{{- define "shoal.claim" -}}
- metadata:
    name: data
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .size }}
{{- end -}}
