{{/* The pod of a pool's nodes. Called with a dict: root, pool (with what `workers` says of all pools). */}}
{{- define "shoal.workerTemplate" -}}
{{- $root := .root -}}
{{- $pool := merge .pool (dict "spot" false) -}}
{{- $isGpu := not (hasPrefix "cpu-" $pool.node.device) -}}
{{- $hasGpus := and $pool.gpuResource $isGpu -}}
{{- $image := mergeOverwrite (deepCopy $root.Values.images.worker) (default dict $pool.image) -}}
{{- if and $isGpu (not $image.tag) }}{{ $_ := set $image "tag" (printf "%s-cuda" $root.Chart.AppVersion) }}{{ end -}}
{{- $drainS := sub (int $pool.terminationGracePeriodSeconds) 15 -}}
{{- $selector := merge (dict) (include "shoal.marketSelector" (dict "platform" $root.Values.platform "spot" $pool.spot) | fromYaml) -}}
{{- with $pool.node.zone }}{{- if ne . "default" }}{{- $_ := set $selector "topology.kubernetes.io/zone" . }}{{- end }}{{- end -}}
{{- with $pool.instanceType }}{{- $_ := set $selector "node.kubernetes.io/instance-type" . }}{{- end -}}
{{- $selector = mergeOverwrite $selector (default dict $pool.nodeSelector) -}}
{{- $resources := deepCopy $pool.resources -}}
{{- if $hasGpus -}}
{{- $gpus := dict $pool.gpuResource (include "shoal.plain" (default 1 $pool.node.devices)) -}}
{{- $resources = mergeOverwrite (dict "limits" $gpus "requests" $gpus | deepCopy) $resources -}}
{{- end -}}
metadata:
  labels:
    {{- include "shoal.selectorLabels" (dict "root" $root "component" "ray-worker") | nindent 4 }}
    shoal.io/pool: {{ $pool.name }}
    {{- with $pool.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- /* The connector says which nodes go. Of spot machines Karpenter has to drain those that their cloud takes. */}}
  {{- $kept := dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" }}
  {{- if not $pool.spot }}{{ $_ := set $kept "karpenter.sh/do-not-disrupt" "true" }}{{ end }}
  annotations: {{- toYaml (mergeOverwrite $kept (default dict $pool.podAnnotations)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "shoal.rayName" $root }}-worker
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- include "shoal.pullSecrets" $root | nindent 2 }}
  securityContext: {{- include "shoal.podSecurity" 10001 | nindent 4 }}
  terminationGracePeriodSeconds: {{ int $pool.terminationGracePeriodSeconds }}
  {{- with $selector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $pool.spot $hasGpus $pool.tolerations }}
  tolerations:
    {{- if $pool.spot }}{{ include "shoal.spotTolerations" $root | nindent 4 }}{{ end }}
    {{- if $hasGpus }}
    - {key: {{ $pool.gpuResource }}, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with $pool.tolerations }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- if $pool.affinity }}
  affinity: {{- toYaml $pool.affinity | nindent 4 }}
  {{- else if not (and $pool.spot $pool.shareMachines) }}
  affinity:
    {{- if not $pool.spot }}{{ include "shoal.onDemandAffinity" $root | nindent 4 }}{{ end }}
    {{- if not $pool.shareMachines }}{{ include "shoal.apartAffinity" $root | nindent 4 }}{{ end }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "shoal.image" (dict "root" $root "image" $image) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      securityContext: {{- include "shoal.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "shoal.rayEnv" $root | nindent 8 }}
        # Of `scratch`, for snapshots that memory has no room for, and for data that is read again; the rest is for
        # journals, uploads and logs. A pod that takes more than its volume may hold is evicted.
        {{- range $setting, $share := dict "disk_limit_bytes" 0.64 "data_cache_bytes" 0.16 }}
        {{- if not (hasKey $root.Values.workers.settings $setting) }}
        - name: SHOAL_WORKER_{{ upper $setting }}
          value: {{ mulf (include "shoal.amount" $pool.scratch.size | float64) $share | printf "%.0f" | quote }}
        {{- end }}
        {{- end }}
        {{- with $pool.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      lifecycle:
        preStop:
          exec:
            # Jobs leave with their state while the pod's agent tells them of its deletion; then Ray ends, and the pod.
            command: [sh, -c, "shoal pre-stop {{ $drainS }}; ray stop"]
      {{- with $resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: scratch, mountPath: /var/tmp/shoal}
        {{- include "shoal.objectStoreMount" $root | nindent 8 }}
        {{- with $pool.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    # Snapshots of the state of jobs live here, in memory: it counts against the pod's limit.
    - name: shared-mem
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory }}}
    - name: scratch
      {{- if $pool.scratch.storageClass }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ $pool.scratch.storageClass }}
            resources:
              requests:
                storage: {{ $pool.scratch.size }}
      {{- else }}
      emptyDir: {sizeLimit: {{ $pool.scratch.size }}}
      {{- end }}
    {{- include "shoal.objectStoreVolume" $root | nindent 4 }}
    {{- with $pool.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
