{{/*
Metadata and spec of a pod with one process. Takes root, component, target (of the image), args, role (values of the
role, as a map) and startup (path that answers once the process has started).
*/}}
{{- define "triptych.pod" -}}
{{- $values := .root.Values -}}
{{- $role := .role -}}
{{- $timeout := include "triptych.requestTimeout" $role | int -}}
{{- $suffix := ternary $values.image.gpuSuffix "" (gt (int $role.gpu.count) 0) -}}
metadata:
  labels:
    {{- include "triptych.labels" . | nindent 4 }}
  {{- $annotations := $role.annotations }}
  {{- if and (not $values.keys.existingSecret) $values.keys.apiKeys }}
  {{- $annotations = set (deepCopy $annotations) "checksum/api-keys" ($values.keys.apiKeys | toJson | sha256sum | trunc 16) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "triptych.account" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # A drain waits for what is under way, at most as long as a request may live; then the process ends.
  terminationGracePeriodSeconds: {{ add $timeout 20 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $role.gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.spread }}
  topologySpreadConstraints:
    {{- range . }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "triptych.selector" $.root | nindent 10 }}
          app.kubernetes.io/component: {{ $.component }}
    {{- end }}
  {{- end }}
  containers:
    - name: triptych
      image: {{ include "triptych.image" (dict "root" .root "target" .target "suffix" $suffix) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
      env:
        - name: TRIPTYCH_INSTANCE_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: TRIPTYCH_ADVERTISE_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: TRIPTYCH_HOST
          value: 0.0.0.0
        - name: TRIPTYCH_MODEL
          value: {{ $values.model | quote }}
        - name: TRIPTYCH_CLUSTER
          value: {{ include "triptych.fullname" .root }}
        - name: TRIPTYCH_LOG_FORMAT
          value: json
        - name: TRIPTYCH_BROKER
          valueFrom: {secretKeyRef: {name: {{ include "triptych.secret" .root }}, key: broker-url}}
        - name: TRIPTYCH_CLUSTER_KEY
          valueFrom: {secretKeyRef: {name: {{ include "triptych.secret" .root }}, key: cluster-key}}
        {{- if eq .component "proxy" }}
        {{- if or $values.keys.apiKeysSecret $values.keys.apiKeys }}
        - name: TRIPTYCH_API_KEY_FILE
          value: /keys/api-keys
        {{- end }}
        {{- else }}
        # Only pods of the cluster and of `networkPolicy.metricsFrom` reach a worker.
        - name: TRIPTYCH_METRICS_WITHOUT_KEY
          value: "true"
        - name: TOKENIZERS_PARALLELISM
          value: "false"
        {{- end }}
        {{- if $suffix }}
        - name: TRITON_CACHE_DIR
          value: /cache/triton
        - name: TORCHINDUCTOR_CACHE_DIR
          value: /cache/inductor
        - name: FLASHINFER_WORKSPACE_BASE
          value: /cache/flashinfer
        {{- end }}
        {{- with $values.hub.tokenSecret.name }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.hub.tokenSecret.key }}}}
        {{- end }}
        {{- include "triptych.variables" (dict "prefix" "TRIPTYCH_" "settings" $role.settings) | indent 8 }}
        {{- range $name, $value := $role.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      ports:
        - {name: http, containerPort: 8000}
      # Loading takes its time; a pod whose process never gets there starts again.
      startupProbe:
        httpGet: {path: {{ .startup }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $role.startupSeconds 4) 5 }}
      # Not ready: draining, without its broker, without its other half. Nothing new comes here.
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 2
      # 503 only where a new process helps: a step beyond step_timeout_s, a dead engine. A long step is answered by 200.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command: [python3, -m, common.http.drain, {{ add $timeout 10 | quote }}]
      {{- $resources := deepCopy $role.resources }}
      {{- if $role.gpu.count }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict $role.gpu.resource (int $role.gpu.count))) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: hub, mountPath: /cache}
        {{- if eq .target "worker" }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if or $values.models.existingClaim $values.models.hostPath }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and (eq .component "proxy") (or $values.keys.apiKeysSecret $values.keys.apiKeys) }}
        - {name: keys, mountPath: /keys, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if eq .target "worker" }}
    - name: shm
      emptyDir: {medium: Memory}
    {{- end }}
    {{- include "triptych.volumes" (dict "root" .root "keys" (eq .component "proxy")) | nindent 4 }}
{{- end }}

{{/*
Volumes of models, of what the hub gives, and of API keys where the pod reads those. Takes root, and keys: whether it does.
*/}}
{{- define "triptych.volumes" -}}
{{- $values := .root.Values -}}
- name: hub
  {{- if $values.hub.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $values.hub.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $values.hub.size }}}
  {{- end }}
{{- if $values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ $values.models.existingClaim }}, readOnly: true}
{{- else if $values.models.hostPath }}
- name: models
  hostPath: {path: {{ $values.models.hostPath }}, type: Directory}
{{- end }}
{{- if and .keys (or $values.keys.apiKeysSecret $values.keys.apiKeys) }}
- name: keys
  secret:
    secretName: {{ $values.keys.apiKeysSecret | default (printf "%s-api" (include "triptych.fullname" .root)) }}
{{- end }}
{{- end }}
