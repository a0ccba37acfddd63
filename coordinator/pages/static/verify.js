// The page that checks a round's ledger: asks for the round, shows the progress, and says what was proved and what not.
//
// - It writes text only, never markup; nothing is sent anywhere but to the round's address.

import { RoundCheck } from "./round.js";
import { Unproved, missing, parseWitness } from "./signed.js";

const byId = (id) => document.getElementById(id);
const whole = (count) => count.toLocaleString("en");
const counted = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

function el(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** What the visitor typed is wrong: nothing was asked of a server. */
class WrongInput extends Error {}

/** Returns the address and the fingerprint (or "") of a join string or an address. */
export function parseRound(text) {
  const match = /^(https?:\/\/[^\s#]+?)\/*(?:#([0-9a-f]{64}))?$/.exec(text.trim());
  if (!match) throw new WrongInput("This is not the address of a round. One looks like http://host:port, or is a whole join string.");
  return { base: match[1], roundId: match[2] ?? "" };
}

/** Returns the keys of the witnesses that the visitor pasted. */
async function pastedWitnesses(text) {
  const keys = new Set(text.split(/\s+/).filter(Boolean));
  try {
    return await Promise.all([...keys].map(parseWitness));
  } catch (error) {
    throw new WrongInput(error.message);
  }
}

class Server {
  constructor(base) {
    this.base = base;
  }

  async get(path, maxBytes) {
    let reply = null;
    try {
      reply = await fetch(`${this.base}/v1/${path}`, { cache: "no-store", credentials: "omit", redirect: "error" });
    } catch {
      const isSaved = !location.protocol.startsWith("http");
      const isElsewhere = !isSaved && new URL(this.base).origin !== location.origin;
      throw new Error(isElsewhere
        ? `This copy of the page cannot reach ${this.base}. Save the page and open it from your disk, or open ${this.base}/verify.html.`
        : `${this.base} does not answer${isSaved ? ` a saved page. It is stopped, or its address is private: then open ${this.base}/verify.html` : ""}.`);
    }
    if (reply.status === 404) return null;
    if (!reply.ok) throw new Error(`${this.base} answers ${path} with status ${reply.status}.`);
    return limited(reply.body.getReader(), path, maxBytes);
  }
}

async function limited(reader, path, maxBytes) {
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > maxBytes) {
      await reader.cancel();
      throw new Unproved(`The answer to ${path} is larger than ${whole(maxBytes)} bytes.`);
    }
    parts.push(value);
  }
  const data = new Uint8Array(size);
  for (let place = 0; parts.length; ) {
    const part = parts.shift();
    data.set(part, place);
    place += part.length;
  }
  return data;
}

function showProgress(started) {
  return (done, total) => {
    const seconds = (performance.now() - started) / 1000;
    byId("bar").hidden = false;
    byId("bar").max = total;
    byId("bar").value = done;
    byId("progress").textContent = `${whole(done)} of ${counted(total, "entry", "entries")}, ${whole(Math.round(done / seconds))} per second.`;
  };
}

function showVerdict(verdict, kind) {
  byId("verdict").textContent = verdict;
  byId("verdict").className = kind;
}

function showList(id, sentences) {
  byId(id).replaceChildren(...sentences.map((text) => el("li", text)));
  byId(`${id}-part`).hidden = sentences.length === 0;
}

function exact(micros, unit) {
  const digits = String(micros).padStart(7, "0");
  const part = digits.slice(-6).replace(/0+$/, "").padEnd(2, "0");
  return `${digits.slice(0, -6)}.${part} ${unit}`;
}

function proved(found, isPinned, witnesses) {
  const signers = Object.keys(found.witnessed);
  const least = Math.min(...Object.values(found.witnessed));
  return [
    isPinned && `The round is the one of your join string: its first root document has the fingerprint ${found.roundId}.`,
    `The chain of ${counted(found.roots, "root document")}, each signed by the keys before it, names the ledger's key. `
      + `This key has signed the checkpoint of ${counted(found.size, "entry", "entries")}.`,
    `These entries, hashed into a tree, give the signed root ${found.root.slice(0, 16)}…. None is missing, added or altered.`,
    `Every entry is possible after those before it. Nodes are owed ${exact(found.owedMicros, found.unit)} in total.`,
    `The leaderboard shows, for ${counted(found.boardNodes, "node")}, the sums of the first ${counted(found.boardSize, "entry", "entries")}.`,
    found.loggedRoots > 0 && "The log names exactly the root documents that were shown to you.",
    `The lottery sampled ${whole(found.drawn)} of ${counted(found.claims, "claim")} in its lists; each sampled one was audited before it was paid.`,
    found.updates > 0 && `The learner's updates up to ${whole(found.updates)} are one chain of states.`,
    ...found.gaps.map((gap) => `The root keys have signed that the log goes on after its first ${counted(gap.size, "entry", "entries")}; later ones were lost.`),
    found.beginnings > 0 && `${counted(found.beginnings, "checkpoint")} that the server lists apart ${found.beginnings === 1 ? "is a beginning" : "are beginnings"} of this log.`,
    signers.length > 0 && `${signers.length} of your ${counted(witnesses.length, "witness", "witnesses")} signed at least the first ${counted(least, "entry", "entries")}.`,
  ].filter(Boolean);
}

function left(found, isPinned, witnesses, base) {
  const signers = Object.keys(found.witnessed).length;
  const lacking = witnesses.filter((witness) => !(witness.text in found.witnessed)).map((witness) => witness.name);
  return [
    !isPinned && `Whose round this is. The page trusts the key that ${base} names. Paste the join string to compare it with one that you have from elsewhere.`,
    found.loggedRoots === 0 && "That all readers see the same keys: this log is older than the entries that name root documents.",
    lacking.length > 0 && `That ${lacking.join(", ")} signed this log: the server shows no signature of theirs.`,
    witnesses.length === 0 && (found.witnessNames.length
      ? `The signatures of ${found.witnessNames.join(", ")}: paste the keys of the witnesses whom you trust.`
      : "That others see the same log: no witness has signed it."),
    signers > 0 && "That entries since the witnesses' last signatures are the same for everybody.",
    "That an acceptance, a rejection or a price was just, and when an entry was made.",
    "That this page is the one which you think it is: a server can send another one. Save it, and compare or read it.",
  ].filter(Boolean);
}

function showMistake(error, base) {
  const isTyped = error instanceof WrongInput;
  const isWrong = error instanceof Unproved;
  showVerdict(isTyped ? "Nothing was checked." : isWrong ? "Not proved: something is wrong." : "Not finished.", "bad");
  byId("mistake").textContent = error.message;
  if (error.entry !== null && error.entry !== undefined) {
    byId("mistake").append(" ", el("a", `Entry ${error.entry}`, { href: `${base}/entries/${error.entry}` }));
  }
}

async function checkRound() {
  for (const id of ["mistake", "progress"]) byId(id).textContent = "";
  showList("proved", []);
  showList("left", []);
  let base = "";
  try {
    const lacking = await missing();
    if (lacking) throw new Error(`${lacking} Save the page and open it from your disk, or use: swarm-node ledger verify JOIN_STRING`);
    const round = parseRound(byId("round").value);
    base = round.base;
    const witnesses = await pastedWitnesses(byId("witnesses").value);
    showVerdict("Checking…", "");
    const check = new RoundCheck(new Server(base), { ...round, witnesses, progress: showProgress(performance.now()) });
    const found = await check.run();
    showList("proved", proved(found, check.isPinned, witnesses));
    showList("left", left(found, check.isPinned, witnesses, base));
    const isSigned = witnesses.every((witness) => witness.text in found.witnessed);
    showVerdict(isSigned ? `Proved: ${counted(found.size, "entry", "entries")}.` : "Proved, except for witnesses.", isSigned ? "good" : "bad");
  } catch (error) {
    showMistake(error, base);
  }
}

const asked = new URLSearchParams(location.search).get("round");
const here = location.protocol.startsWith("http") ? new URL(".", location.href).href : "";
byId("round").value = asked ? asked + location.hash : here.replace(/\/$/, "");
byId("back").hidden = !here;
byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  byId("check").disabled = true;
  await checkRound();
  byId("check").disabled = false;
});
