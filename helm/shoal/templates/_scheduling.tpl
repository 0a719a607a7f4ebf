{{/* What marks machines of each market, by who runs the cluster. */}}
{{- define "shoal.marketSelector" -}}
{{- $spot := .spot -}}
{{- if and (eq .platform "eks") $spot }}
eks.amazonaws.com/capacityType: SPOT
{{- else if and (eq .platform "karpenter") $spot }}
karpenter.sh/capacity-type: spot
{{- else if and (eq .platform "gke") $spot }}
cloud.google.com/gke-spot: "true"
{{- else if and (eq .platform "aks") $spot }}
kubernetes.azure.com/scalesetpriority: spot
{{- end }}
{{- end -}}

{{/* No machine that can be taken away, wherever this runs: a label that is absent is in no list. */}}
{{- define "shoal.onDemandAffinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - {key: eks.amazonaws.com/capacityType, operator: NotIn, values: [SPOT]}
          - {key: karpenter.sh/capacity-type, operator: NotIn, values: [spot]}
          - {key: cloud.google.com/gke-spot, operator: NotIn, values: ["true"]}
          - {key: cloud.google.com/gke-preemptible, operator: NotIn, values: ["true"]}
          - {key: kubernetes.azure.com/scalesetpriority, operator: NotIn, values: [spot]}
{{- end -}}

{{/* One node of the Ray cluster to a machine: copies of state on another node are to outlive the machine. */}}
{{- define "shoal.apartAffinity" -}}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {ray.io/cluster: {{ include "shoal.rayName" . }}, ray.io/node-type: worker}
{{- end -}}

{{- define "shoal.spotTolerations" -}}
- {key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}
- {key: cloud.google.com/gke-preemptible, operator: Equal, value: "true", effect: NoSchedule}
- {key: kubernetes.azure.com/scalesetpriority, operator: Equal, value: spot, effect: NoSchedule}
- {key: shoal.io/spot, operator: Exists, effect: NoSchedule}
{{- end -}}

{{/* nodeSelector, tolerations, affinity, priority of a pod that must not be taken away. Called with the values of its
component. */}}
{{- define "shoal.safePlace" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .affinity }}
affinity: {{- toYaml .affinity | nindent 2 }}
{{- else if .onDemandOnly }}
affinity: {{- include "shoal.onDemandAffinity" . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
