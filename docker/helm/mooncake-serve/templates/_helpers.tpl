{{- define "mooncake.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of (dict "root" $ "component" NAME), by which its pods are selected. */}}
{{- define "mooncake.selector" -}}
app.kubernetes.io/name: mooncake-serve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "mooncake.labels" -}}
{{ include "mooncake.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* The Secrets that processes of (dict "root" $ "component" NAME) read as files, each by its name in the values. */}}
{{- define "mooncake.secrets" -}}
{{- $etcd := .root.Values.etcd -}}
{{- $read := list "clusterKey" -}}
{{- if has .component (list "conductor" "front") -}}
{{- $read = concat $read (list "apiKeys" "adminKeys" "httpTls") -}}
{{- else -}}
{{- $read = append $read "clusterTls" -}}
{{- end -}}
{{- if $etcd.endpoints -}}
{{- $read = concat $read (list "etcdCa" "etcdCert") -}}
{{- if $etcd.user -}}
{{- $read = append $read "etcdPassword" -}}
{{- end -}}
{{- end -}}
{{- range $name := $read }}
{{- with get $.root.Values.secrets $name }}
{{ $name }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the chart sets of the configuration of (dict "root" $ "component" NAME): where things are in its pods. */}}
{{- define "mooncake.config" -}}
{{- $etcd := .root.Values.etcd -}}
{{- $secrets := include "mooncake.secrets" . | fromYaml -}}
http:
  host: 0.0.0.0
  port: 8000
  admin_listen: 0.0.0.0:8010
  {{- if $secrets.apiKeys }}
  api_keys_file: /secrets/apiKeys/clients.yaml
  {{- end }}
  {{- if $secrets.adminKeys }}
  admin_keys_file: /secrets/adminKeys/admins.yaml
  {{- end }}
  {{- if $secrets.httpTls }}
  tls_cert: /secrets/httpTls/tls.crt
  tls_key: /secrets/httpTls/tls.key
  {{- end }}
{{- if eq .component "conductor" }}
conductor:
  state_file: /state/conductor.db
{{- end }}
messenger:
  port: 7900
worker:
  metrics_listen: 0.0.0.0:9100
security:
  key_file: /secrets/clusterKey/cluster.key
  {{- if $secrets.clusterTls }}
  tls_cert: /secrets/clusterTls/tls.crt
  tls_key: /secrets/clusterTls/tls.key
  tls_ca: /secrets/clusterTls/ca.crt
  {{- end }}
{{- with $etcd.endpoints }}
cluster:
  etcd_endpoints: {{ toJson . }}
  etcd_prefix: {{ $etcd.prefix | default (printf "/mooncake/%s/%s" $.root.Release.Namespace $.root.Release.Name) }}
  {{- if $secrets.etcdCa }}
  etcd_ca: /secrets/etcdCa/ca.crt
  {{- end }}
  {{- if $secrets.etcdCert }}
  etcd_cert: /secrets/etcdCert/tls.crt
  etcd_key: /secrets/etcdCert/tls.key
  {{- end }}
  {{- with $etcd.user }}
  etcd_user: {{ . }}
  etcd_password_file: /secrets/etcdPassword/password
  {{- end }}
{{- end }}
{{- end -}}

{{/* Values of the instances of (dict "root" $ "role" prefill|decode). */}}
{{- define "mooncake.instances" -}}
{{- mergeOverwrite (deepCopy .root.Values.instances) (deepCopy (get .root.Values .role)) | toYaml -}}
{{- end -}}

{{/* Pods are made anew when their own file of the configuration changes, not with each version of the chart. */}}
{{- define "mooncake.metadata" -}}
{{- $files := (include (print .root.Template.BasePath "/config.yaml") .root | fromYaml).data -}}
labels: {{- include "mooncake.selector" . | nindent 2 }}
annotations:
  checksum/config: {{ get $files (printf "%s.yaml" .component) | sha256sum }}
  {{- with .values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Fields of each pod but its containers, of (dict "root" $ "component" NAME "values" VALUES). `volumes` is last:
     others can follow. */}}
{{- define "mooncake.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  {{- if .values.rdma }}
  # Only root has IPC_LOCK: a container's other users do not get the capabilities that are added.
  runAsUser: 0
  {{- else }}
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: {{ .root.Values.spread }}
    labelSelector:
      matchLabels: {{- include "mooncake.selector" . | nindent 8 }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: config
    configMap: {name: {{ include "mooncake.name" .root }}}
  - name: home # compiled kernels, models of a hub
    emptyDir: {}
  {{- range $name, $secret := include "mooncake.secrets" . | fromYaml }}
  - name: {{ lower $name }}
    secret: {secretName: {{ $secret }}, defaultMode: 0400}
  {{- end }}
  {{- with .root.Values.modelVolume }}
  - name: models
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Fields of each container but ports and probes, of the same. `volumeMounts` is last: others can follow. */}}
{{- define "mooncake.container" -}}
{{- $root := .root -}}
{{- $name := include "mooncake.name" $root -}}
name: mooncake
image: {{ $root.Values.image.repository }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
args: [--config, /config/{{ .component }}.yaml]
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]{{ if .values.rdma }}, add: [IPC_LOCK]{{ end }}}
resources: {{- toYaml .values.resources | nindent 2 }}
env:
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: HOME, value: /home/mooncake}
  - {name: MOONCAKE_ROLE, value: {{ .component }}}
  {{- if eq .component "conductor" }}
  - {name: MOONCAKE_CONDUCTOR_ENDPOINT, value: "tcp://$(POD_IP):7800"}
  {{- else if not $root.Values.etcd.endpoints }}
  - {name: MOONCAKE_CONDUCTOR_ENDPOINT, value: "tcp://{{ $name }}-conductor:7800"}
  {{- end }}
  {{- if has .component (list "conductor" "front") }}
  - {name: MOONCAKE_CONDUCTOR_REPLY_ENDPOINT, value: "tcp://$(POD_IP):7801"}
  {{- else }}
  - {name: MOONCAKE_INSTANCE, value: $(POD_NAME)}
  - {name: MOONCAKE_MESSENGER_HOSTS, value: $(POD_IP)}
  {{- end }}
  {{- with $root.Values.secrets.hubToken }}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
  {{- end }}
volumeMounts:
  - {name: config, mountPath: /config, readOnly: true}
  - {name: home, mountPath: /home/mooncake}
  {{- range $secret, $_ := include "mooncake.secrets" . | fromYaml }}
  - {name: {{ lower $secret }}, mountPath: /secrets/{{ $secret }}, readOnly: true}
  {{- end }}
  {{- if $root.Values.modelVolume }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
{{- end -}}
