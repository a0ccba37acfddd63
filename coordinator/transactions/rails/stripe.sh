#!/bin/sh
# Pays a payout batch by transfers to connected accounts:  STRIPE_API_KEY=sk_... sh THIS_FILE
#
# Run it again after every interruption: before each transfer it asks Stripe whether one with this payment's id (its
# transfer_group) exists. The id is the idempotency key, too, so that two scripts at once pay once.
# Stripe repeats its answer to an id for a day: after "insufficient funds", fill the balance and run it a day later.
# Needs curl and jq. Exit codes: 0 everybody is paid, 1 run it again.
set -eu
: "${STRIPE_API_KEY:?Set STRIPE_API_KEY to a secret or restricted key that may read and write transfers.}"
api=${STRIPE_API:-https://api.stripe.com}
batch=@BATCH@
paid=0
missing=0

ask() {
    # The key is read from standard input, so that no list of processes shows it.
    printf 'header = "Authorization: Bearer %s"\n' "$STRIPE_API_KEY" |
        curl --silent --show-error --globoff --max-time 60 --config - "$@"
}

transfer() {
    id=$1 amount=$2 currency=$3 account=$4
    known=$(ask --get --data-urlencode "transfer_group=$id" --data limit=1 "$api/v1/transfers") || known=
    count=$(printf '%s' "$known" | jq -r 'select(.object == "list") | .data | length') || count=
    if [ -z "$count" ]; then # jq's exit code for no output differs between its versions
        printf '%s: Stripe does not say whether it is paid: %s\n' "$id" "$known" >&2
        missing=$((missing + 1))
        return
    fi
    if [ "$count" = 0 ]; then
        answer=$(ask --header "Idempotency-Key: $id" --data-urlencode "amount=$amount" \
            --data-urlencode "currency=$currency" --data-urlencode "destination=$account" \
            --data-urlencode "transfer_group=$id" "$api/v1/transfers") || answer=
        if [ "$(printf '%s' "$answer" | jq -r .object)" != transfer ]; then
            printf '%s: not paid: %s\n' "$id" "$answer" >&2
            missing=$((missing + 1))
            return
        fi
    fi
    paid=$((paid + 1))
}

@PAYMENTS@
printf 'batch %s: %d paid, %d not paid\n' "$batch" "$paid" "$missing"
[ "$missing" = 0 ]
