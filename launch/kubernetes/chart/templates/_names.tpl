{{- define "triptych.fullname" -}}
{{- if contains "triptych" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-triptych{{ end -}}
{{- end }}

{{- define "triptych.selector" -}}
app.kubernetes.io/name: triptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of an object; .component is a role with dashes, proxy or broker. */}}
{{- define "triptych.labels" -}}
{{ include "triptych.selector" .root }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "triptych.image" -}}
{{- $image := .root.Values.image -}}
{{ with $image.registry }}{{ . }}/{{ end }}triptych-{{ .target }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ .suffix }}
{{- end }}

{{- define "triptych.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "triptych.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end }}

{{- define "triptych.secret" -}}
{{ .Values.keys.existingSecret | default (include "triptych.fullname" .) }}
{{- end }}

{{/* The longest life of a request in whole seconds, from the settings of the process or its default. */}}
{{- define "triptych.requestTimeout" -}}
{{ ceil (.settings.request_timeout_s | default 600) | int }}
{{- end }}

{{/* Settings as variables: nested ones by __, as the program reads them. */}}
{{- define "triptych.variables" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings }}
{{- if kindIs "map" $value }}
{{- include "triptych.variables" (dict "prefix" (printf "%s%s__" $prefix (upper $name)) "settings" $value) }}
{{- else }}
- name: {{ $prefix }}{{ upper $name }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else if kindIs "float64" $value }}{{ $value | toJson | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The values of a role over the defaults, as YAML: the settings common to all processes lie below its own. */}}
{{- define "triptych.role" -}}
{{- $role := mergeOverwrite (deepCopy .root.Values.roleDefaults) (deepCopy (.values | default dict)) -}}
{{- $_ := set $role "settings" (mergeOverwrite (deepCopy .root.Values.settings) $role.settings) -}}
{{- if $role.gpu.count }}
{{- $engine := dict "device" "cuda" -}}
{{- if gt (int $role.gpu.clients) 1 }}
{{- if eq $role.gpu.sharing "none" }}{{ fail (printf "%s: several clients of a GPU need gpu.sharing timeSlicing or mps" .name) }}{{ end }}
{{- $_ := set $engine "memory_fraction" (round (divf 0.9 $role.gpu.clients) 3) -}}
{{- end }}
{{- $_ := set $role.settings "engine" (mergeOverwrite $engine ($role.settings.engine | default dict)) -}}
{{- end }}
{{- toYaml $role }}
{{- end }}

{{/* How many pods of a role there may be: with an autoscaler its bounds count, not `replicas`. */}}
{{- define "triptych.isRun" -}}
{{- if or .replicas (ne .autoscaling.kind "none") }}yes{{ end }}
{{- end }}
