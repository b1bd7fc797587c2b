#!/bin/sh
# The entry point of the image: text-generation-launcher with the arguments of `docker run`. A container that starts as root
# gives the folder of the models to uid 1000 and goes on as that; any other user (`docker run --user`) stays as it is.
set -eu
user=1000
: "${HF_HOME:=/data}"

# Volumes of TGI's older images have the hub's cache at the top of /data, those of newer ones in /data/hub.
if [ -z "${HUGGINGFACE_HUB_CACHE:-}" ] && [ ! -d "$HF_HOME/hub" ] && [ -n "$(ls -d "$HF_HOME"/models--* 2>/dev/null)" ]; then
    export HUGGINGFACE_HUB_CACHE="$HF_HOME"
fi
folder="${HUGGINGFACE_HUB_CACHE:-$HF_HOME}"

# The right to listen on port 80 is the only one that is kept.
rights=-all,+net_bind_service
as_user="setpriv --reuid=$user --regid=$user --clear-groups --no-new-privs --bounding-set=$rights --inh-caps=$rights --ambient-caps=$rights"
if [ "$(id -u)" = 0 ] && $as_user true 2>/dev/null; then
    # TGI's server ran as root. What other users own is left alone: the folder may be one of the host.
    mkdir -p "$folder" 2>/dev/null || :
    find "$folder" -xdev -user 0 -exec chown -h $user:$user {} + 2>/dev/null || :
    exec $as_user "$0" "$@"
fi
if ! mkdir -p "$folder" 2>/dev/null || ! [ -w "$folder" ]; then
    owner="$(stat -c %u "$folder" 2>/dev/null || echo unknown)"
    echo "$folder cannot be written by uid $(id -u), its owner is uid $owner: only models that are there are served." \
        "To download others, mount a folder that can be written, or run with --user $owner" >&2
fi
# SageMaker starts each image with the word `serve`, asks port 8080, and has names of its own for the launcher's variables.
if [ "${1:-}" = serve ] || [ -n "${HF_MODEL_ID:-}" ]; then
    [ "${1:-}" != serve ] || shift
    set -- --port "${SAGEMAKER_BIND_TO_PORT:-8080}" "$@"
    export MODEL_ID="${HF_MODEL_ID:-${MODEL_ID:-}}" REVISION="${HF_MODEL_REVISION:-${REVISION:-}}"
    export NUM_SHARD="${SM_NUM_GPUS:-${NUM_SHARD:-}}" QUANTIZE="${HF_MODEL_QUANTIZE:-${QUANTIZE:-}}"
    export TRUST_REMOTE_CODE="${HF_MODEL_TRUST_REMOTE_CODE:-${TRUST_REMOTE_CODE:-}}"
fi
exec text-generation-launcher "$@"
