{{- define "settings" -}}
- /etc/swarm-round/round.toml
- --set=round.directory=/data/round
- --set=round.listen=0.0.0.0:8700
- {{ printf "--set=round.public_url=%s" (.Values.publicUrl | default (printf "http://%s:8700" .Release.Name)) | quote }}
- --set=round.seeder=0.0.0.0:8701
- {{ printf "--set=round.seeder_public=%s" (.Values.seederPublic | default (printf "%s:8701" .Release.Name)) | quote }}
- {{ printf "--set=round.trusted_proxies=%s" (toJson .Values.trustedProxies) | quote }}
{{- if .Values.databaseSecret }}
- --set=store.url=$(STORE_URL)
{{- end }}
{{- end }}

{{- define "container" -}}
image: {{ required "Give `image`: the name of the coordinator's image in a registry." .Values.image | quote }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
env:
  - {name: HOME, value: /data}
{{- if .Values.databaseSecret }}
  - name: STORE_URL
    valueFrom: {secretKeyRef: {name: {{ .Values.databaseSecret }}, key: url}}
  - name: PGPASSWORD
    valueFrom: {secretKeyRef: {name: {{ .Values.databaseSecret }}, key: password}}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: settings, mountPath: /etc/swarm-round, readOnly: true}
  - {name: scratch, mountPath: /tmp}
{{- end }}

{{- define "pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
{{- end }}
