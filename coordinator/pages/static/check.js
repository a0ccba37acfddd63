// The "check" buttons of a node's page: fetch a receipt, check it in the browser, and show the result.

import { check } from "./receipt.js";
import { missing } from "./signed.js";

const { round, node, unit } = document.querySelector("[data-round]").dataset;
const result = document.getElementById("checked");

function say(text, kind) {
  result.textContent = text;
  result.className = kind;
}

// Every decimal that is not zero, as `Unit.exact` shows an amount.
function exact(micros) {
  const digits = String(micros).padStart(7, "0");
  const part = digits.slice(-6).replace(/0+$/, "").padEnd(2, "0");
  return `${digits.slice(0, -6)}.${part} ${unit}`;
}

async function prove(button) {
  const claim = button.dataset.claim;
  const lacking = await missing();
  if (lacking) return say(`${lacking} Use instead: swarm-node ledger check`, "bad");
  const reply = await fetch(`/v1/receipts/${claim}`);
  if (!reply.ok) return say("There is no receipt yet. Try again after the next checkpoint, in a few seconds.", "bad");
  const proved = await check(new Uint8Array(await reply.arrayBuffer()), round, claim);
  if (proved.nodeId !== node) throw new Error("The receipt credits a different node.");
  say(
    `Proved: claim ${claim.slice(0, 12)}… is ${proved.state}, ${exact(proved.amountMicros)} for ${proved.tokens} tokens, `
      + `under the signed checkpoint of ${proved.size} entries.`,
    "good",
  );
  button.textContent = "✓ checked";
}

document.getElementById("receipts").addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-claim]");
  if (!button) return;
  button.disabled = true;
  try {
    await prove(button);
  } catch (error) {
    say(`Not proved: ${error.message}`, "bad");
  } finally {
    button.disabled = false;
  }
});
