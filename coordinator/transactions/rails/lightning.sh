#!/bin/sh
# Pays a payout batch by your Lightning node:  sh THIS_FILE lightning-cli   or   sh THIS_FILE lncli
#
# Run it again after every interruption, as the same user on the same machine: it requests one invoice for each payment,
# keeps it before it pays, and pays no other. A node pays an invoice once. The invoices are in
# ~/.echo-swarm/payouts/BATCH (ECHO_SWARM_PAYOUTS names another folder): keep them.
# Needs curl and jq. Offers (BOLT12) need lightning-cli. Exit codes: 0 everybody is paid, 1 run it again, 2 wrong usage.
set -eu
umask 077
LC_ALL=C
export LC_ALL
cli=${1:-}
case ${cli##*/} in
lightning-cli | lncli) ;;
*)
    echo "Name your node's program: sh $0 lightning-cli, or sh $0 lncli" >&2
    exit 2
    ;;
esac
batch=@BATCH@
folder=${ECHO_SWARM_PAYOUTS:-$HOME/.echo-swarm/payouts}/$batch
mkdir -p "$folder"
paid=0
missing=0

fetch() { curl --silent --show-error --globoff --proto =https --max-time 60 --max-filesize 1000000 --url "$1"; }

request_invoice() { # kind msat target
    if [ "$1" = offer ]; then
        "$cli" -k fetchinvoice offer="$3" amount_msat="$2" | jq -r '.invoice // ""'
        return
    fi
    said=$(fetch "$3") || return 1
    callback=$(printf '%s' "$said" | jq -r --argjson msat "$2" \
        'select(.tag == "payRequest" and .minSendable <= $msat and $msat <= .maxSendable) | .callback // ""') || return 1
    if [ -z "$callback" ]; then # jq's exit code for no output differs between its versions
        echo "the service does not accept $2 msat: $said" >&2
        return 1
    fi
    case $callback in
    *\?*) callback="$callback&amount=$2" ;;
    *) callback="$callback?amount=$2" ;;
    esac
    fetch "$callback" | jq -r '.pr // ""'
}

amount_of() { # invoice
    case ${cli##*/} in
    lightning-cli) "$cli" decode "$1" |
        jq -r 'select(.valid) | .amount_msat // .invoice_amount_msat | tostring | rtrimstr("msat")' ;;
    *) "$cli" decodepayreq "$1" | jq -r '.num_msat | tostring' ;;
    esac
}

settle() { # invoice
    case ${cli##*/} in
    lightning-cli) [ "$("$cli" pay "$1" | jq -r .status)" = complete ] ;;
    *)
        said=$("$cli" payinvoice --force --json "$1" 2>&1) && return
        case $said in
        *"already paid"*) ;;
        *)
            printf '%s\n' "$said" >&2
            return 1
            ;;
        esac
        ;;
    esac
}

new_invoice() { # kind msat target; prints an invoice of exactly this amount
    invoice=$(request_invoice "$@") || return 1
    invoice=$(printf '%s' "$invoice" | tr '[:upper:]' '[:lower:]')
    case $invoice in
    *[!a-z0-9]* | '') invoice= ;;
    ln*) ;;
    *) invoice= ;;
    esac
    if [ -z "$invoice" ]; then
        echo "the service returned no invoice" >&2
        return 1
    fi
    amount=$(amount_of "$invoice") || amount=unknown
    if [ "$amount" != "$2" ]; then
        echo "the invoice is for $amount msat and not for $2; if this stays so, pay this owner by hand" >&2
        return 1
    fi
    printf '%s' "$invoice"
}

pay_once() { # kind id msat target
    kept=$folder/$2
    [ ! -e "$kept.paid" ] || return 0
    if [ ! -e "$kept.invoice" ]; then
        invoice=$(new_invoice "$1" "$3" "$4") || return 1
        fresh=$(mktemp "$folder/new.XXXXXX") || return 1
        printf '%s' "$invoice" >"$fresh" || return 1
        sync "$fresh" 2>/dev/null || sync
        ln "$fresh" "$kept.invoice" 2>/dev/null || [ -e "$kept.invoice" ] || return 1 # of two scripts, the first one's
        rm -f "$fresh"
        sync "$folder" 2>/dev/null || sync
    fi
    invoice=$(cat "$kept.invoice") || return 1
    settle "$invoice" >/dev/null || {
        echo "$kept.invoice is not paid. If it has expired and your node's list shows that it was never paid and" \
            "is not pending, delete this file and run the script again." >&2
        return 1
    }
    : >"$kept.paid"
}

pay() { # kind id msat target
    if [ "$1" = offer ] && [ "${cli##*/}" = lncli ]; then
        echo "$2: not paid: lncli cannot pay a BOLT12 offer; use lightning-cli" >&2
        missing=$((missing + 1))
    elif pay_once "$@"; then
        paid=$((paid + 1))
    else
        echo "$2: not paid" >&2
        missing=$((missing + 1))
    fi
}

@PAYMENTS@
printf 'batch %s: %d paid, %d not paid\n' "$batch" "$paid" "$missing"
[ "$missing" = 0 ]
