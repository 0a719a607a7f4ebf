{{/* The labels by which Shoal knows a node of a pool: those of a Node, in bytes (workers/shoal_workers/cluster_ray.py).
Called with a pool. */}}
{{- define "shoal.nodeLabels" -}}
{{- $node := .node -}}
shoal.io/pool: {{ .name }}
shoal.io/device: {{ $node.device | quote }}
shoal.io/devices: {{ include "shoal.plain" (default 1 $node.devices) | quote }}
shoal.io/spot: {{ default false .spot | quote }}
shoal.io/zone: {{ default "default" $node.zone | quote }}
shoal.io/price-per-hour: {{ include "shoal.plain" (default 0 $node.price_per_hour) | quote }}
{{- with $node.intra_gb_per_s }}
shoal.io/intra-bytes-per-s: {{ mulf . 1e9 | printf "%.0f" | quote }}
{{- end }}
shoal.io/inter-bytes-per-s: {{ mulf (default 10 $node.inter_gbit_per_s) 125e6 | printf "%.0f" | quote }}
shoal.io/disk-bytes: {{ mulf (default 100 $node.disk_gib) 1073741824 | printf "%.0f" | quote }}
{{- with $node.host_memory_gib }}
shoal.io/host-memory-bytes: {{ mulf . 1073741824 | printf "%.0f" | quote }}
{{- end }}
{{- with $node.nics }}
shoal.io/nics: {{ include "shoal.plain" . | quote }}
{{- end }}
{{- with $node.device_group }}
shoal.io/device-group: {{ include "shoal.plain" . | quote }}
{{- end }}
{{- with $node.group_gb_per_s }}
shoal.io/group-bytes-per-s: {{ mulf . 1e9 | printf "%.0f" | quote }}
{{- end }}
{{- with $node.preemptions_per_hour }}
shoal.io/preemptions-per-hour: {{ include "shoal.plain" . | quote }}
{{- end }}
{{- end -}}

{{/* Fails for what Kubernetes would refuse or end a pod for, of which KubeRay tells in its own log and events alone. Called
with a dict: where, resources, sharedMemory. */}}
{{- define "shoal.checkResources" -}}
{{- $where := .where -}}
{{- $limits := default dict .resources.limits -}}
{{- range $name, $asked := default dict .resources.requests -}}
{{- with get $limits $name -}}
{{- if gt (include "shoal.amount" $asked | float64) (include "shoal.amount" . | float64) -}}
{{- fail (printf "%s: resources.requests.%s = %s is more than resources.limits.%s = %s" $where $name (include "shoal.plain" $asked) $name (include "shoal.plain" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $limits.memory -}}
{{- if ge (include "shoal.amount" $.sharedMemory | float64) (include "shoal.amount" . | float64) -}}
{{- fail (printf "%s: sharedMemory = %s counts against resources.limits.memory = %s, and leaves nothing of it" $where (include "shoal.plain" $.sharedMemory) (include "shoal.plain" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether the connector asks for nodes: "true", or nothing. */}}
{{- define "shoal.isProvisioned" -}}
{{- if and .Values.rayCluster.enabled .Values.provisioning.enabled .Values.pools -}}true{{- end -}}
{{- end -}}

{{/* Where it finds the pools; of the container that starts it, and of the one that it then runs in. */}}
{{- define "shoal.provisionerEnv" -}}
{{- if include "shoal.isProvisioned" . }}
- {name: SHOAL_PROVISIONER, value: kuberay}
- {name: SHOAL_PROVISIONER_RAYCLUSTER, value: {{ include "shoal.rayName" . }}}
- {name: SHOAL_PROVISIONER_POOLS, value: /etc/shoal/pools/pools.yaml}
{{- end }}
{{- end -}}

{{/* What stands of each pool now, as YAML, where the connector decides: how many nodes, and what the chart says nothing
of. Among that is who is to go, which an upgrade must not undo (the operator would take a pod that is ending for one of
those wanted, and end another in its place), and what the API server has filled in: without it the whole list would
differ from what the connector has patched, and Helm 4 would take an upgrade that changes nothing for a conflict. */}}
{{- define "shoal.livePools" -}}
{{- if include "shoal.isProvisioned" . -}}
{{- $there := lookup "ray.io/v1" "RayCluster" .Release.Namespace (include "shoal.rayName" .) | default dict -}}
{{- range dig "spec" "workerGroupSpecs" list $there }}
{{ .groupName }}:
  replicas: {{ include "shoal.plain" (default 0 .replicas) }}
  others: {{- omit . "groupName" "minReplicas" "maxReplicas" "replicas" "labels" "rayStartParams" "template" | toYaml | nindent 4 }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Variables of every process of the Ray cluster. */}}
{{- define "shoal.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "shoal.raySecret" . }}, key: auth_token}
# Ray would have training give way to everything else on the machine, and hide GPUs that it was not asked for.
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- name: SHOAL_WORKER_KUBERNETES_POD
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- if .Values.rbac.nodes }}
- name: SHOAL_WORKER_KUBERNETES_NODE
  valueFrom:
    fieldRef: {fieldPath: spec.nodeName}
{{- end }}
{{- include "shoal.settingsEnv" (dict "prefix" "SHOAL_WORKER_" "settings" .Values.workers.settings) }}
{{- include "shoal.objectStoreEnv" . }}
{{- end -}}

{{/* Of the control plane's certificate, where its authority is private. */}}
{{- define "shoal.serverCaEnv" -}}
{{- if .Values.connector.serverCaConfigMap }}
- {name: SSL_CERT_FILE, value: /etc/shoal/server-ca/ca.crt}
{{- end }}
{{- end -}}
