// The book that follows from the entries of a ledger: accounts, claims, payouts, and the chain of the learner's updates.
//
// - Every entry must be possible after those before it: a claim is credited and settled once, a payout is covered by its
//   batch and by the node's credit, a secret by its commitment, a ruling by an appeal, an update by its batch.

import { blake3 } from "./blake.js";
import { demand, hex } from "./signed.js";

const NEXT = {
  post: { pending: "posted" },
  void: { pending: "voided" },
  reinstate: { voided: "posted" },
  paid: { paying: "paid" },
};
const DEPOSITED_MAX = 2n ** 62n;

export class Book {
  #once = new Map(); // effect → entry
  #batches = new Map(); // payout batch → { payees, amount, payouts, moved }
  #claims = new Map(); // claim or payout → { node, state, amount, tokens }
  #balances = new Map(); // account → micro-units
  #deposited = 0n;
  training = new Updates();
  roots = []; // [index, entry]

  add(index, entry) {
    const problem = this.#apply(entry) || this.training.add(entry);
    demand(!problem, `Entry ${index}, a ${entry.kind}, cannot stand where it stands: ${problem}`, index);
    if (entry.kind === "root") this.roots.push([index, entry]);
  }

  balance(account) {
    return this.#balances.get(account) ?? 0n;
  }

  /** Returns what nodes are owed: credit that is final and not paid out yet. */
  owed() {
    let sum = 0n;
    for (const [account, micros] of this.#balances) if (/^(payable|paying):/.test(account)) sum += micros;
    return sum;
  }

  /** Returns why the accounts do not sum to the deposits; empty if they do. */
  problem() {
    let sum = 0n;
    for (const micros of this.#balances.values()) sum += micros;
    return sum === this.#deposited ? "" : "The accounts do not sum to what was deposited.";
  }

  /** Returns the row of each node that the leaderboard must show, by node id. */
  rows() {
    const rows = new Map();
    for (const { node, state, amount, tokens } of this.#claims.values()) {
      if (!rows.has(node)) rows.set(node, { posted_micros: 0n, pending_micros: 0n, voided_micros: 0n, validated_tokens: 0n });
      const row = rows.get(node);
      if (state === "posted") row.validated_tokens += tokens;
      if (`${state}_micros` in row) row[`${state}_micros`] += amount;
    }
    return rows;
  }

  #apply(entry) {
    switch (entry.kind) {
      case "pending": return this.#begin(entry.claim_id, entry, "budget", `pending:${entry.node_id}`, "pending");
      case "payout": return this.#payout(entry);
      case "post": return this.#settle(entry.claim_id, entry, "pending", "payable");
      case "void": return this.#settle(entry.claim_id, entry, "pending", "budget");
      case "reinstate": return this.#reinstate(entry);
      case "paid": return this.#paid(entry);
      default: return this.#onceOnly(entry);
    }
  }

  #begin(name, entry, source, sink, state) {
    if (this.#claims.has(name)) return "it is in the ledger twice.";
    const amount = BigInt(entry.amount_micros);
    if (this.balance(source) < amount) return "its amount is not covered.";
    this.#move(source, sink, amount);
    this.#claims.set(name, { node: entry.node_id, state, amount, tokens: BigInt(entry.tokens ?? 0) });
    return "";
  }

  #settle(name, entry, from, to) {
    const claim = this.#claims.get(name);
    const next = claim && NEXT[entry.kind][claim.state];
    if (!next) return claim ? `the claim is ${claim.state} already.` : "there is no such claim before it.";
    const account = (kind) => (kind === "budget" ? kind : `${kind}:${claim.node}`);
    if (this.balance(account(from)) < claim.amount) return "its amount is not covered.";
    this.#move(account(from), account(to), claim.amount);
    claim.state = next;
    return "";
  }

  #reinstate(entry) {
    const ruling = this.#once.get(`ruling:${entry.appealed_claim_id}`);
    if (ruling?.outcome !== "granted" || ruling.reason_code !== entry.reason_code) return "no ruling grants it.";
    return this.#settle(entry.claim_id, entry, "budget", "payable");
  }

  #payout(entry) {
    const batch = this.#batches.get(entry.batch);
    if (!batch) return "its batch was not published.";
    const amount = BigInt(entry.amount_micros);
    const others = batch.payees - BigInt(batch.payouts + 1);
    if (batch.amount - batch.moved - amount < (others > 0n ? others : 0n)) return "it exceeds its batch.";
    const problem = this.#begin(
      `${entry.batch}:${entry.node_id}`, entry, `payable:${entry.node_id}`, `paying:${entry.node_id}`, "paying",
    );
    if (!problem) {
      batch.payouts += 1;
      batch.moved += amount;
    }
    return problem;
  }

  #paid(entry) {
    const batch = this.#batches.get(entry.batch);
    if (!batch) return "its batch was not published.";
    return batch.moved === batch.amount ? this.#settle(`${entry.batch}:${entry.node_id}`, entry, "paying", "paid")
      : "the payouts of its batch are not complete.";
  }

  #onceOnly(entry) {
    const effect = effectOf(entry);
    if (this.#once.has(effect)) return "it is in the ledger twice.";
    if (entry.kind === "reveal") {
      const committed = this.#once.get(`commitment:${entry.epoch}`)?.secret_digest;
      if (committed !== hex(blake3(entry.secret))) return "the secret is not the one that was committed to.";
    }
    if (entry.kind === "ruling" && !this.#once.has(`appeal:${entry.claim_id}`)) return "there is no appeal before it.";
    if (entry.kind === "payout_batch") {
      const amount = BigInt(entry.amount_micros);
      this.#batches.set(entry.batch, { payees: BigInt(entry.payees), amount, payouts: 0, moved: 0n });
    }
    if (entry.kind === "deposit") {
      const deposited = this.#deposited + BigInt(entry.amount_micros);
      if (deposited > DEPOSITED_MAX) return "the deposits are too large.";
      this.#deposited = deposited;
      this.#balances.set("budget", this.balance("budget") + BigInt(entry.amount_micros));
    }
    this.#once.set(effect, entry);
    return "";
  }

  #move(source, sink, amount) {
    this.#balances.set(source, this.balance(source) - amount);
    this.#balances.set(sink, this.balance(sink) + amount);
  }
}

function effectOf(entry) {
  switch (entry.kind) {
    case "deposit": return `deposit:${entry.reference}`;
    case "version": case "root": case "retraction": return `${entry.kind}:${entry.version}`;
    case "commitment": case "reveal": return `${entry.kind}:${entry.epoch}`;
    case "owner": return `owner:${entry.owner}:${entry.number}`;
    case "payout_batch": return `payout_batch:${entry.batch}`;
    case "batch": return `batch:${entry.number}`;
    case "update": return `update:${entry.update}:${entry.attempt}`;
    default: return `${entry.kind}:${entry.claim_id}`;
  }
}

// The updates in the log so far, by the rules of `ledger/training.py`; an entry that does not continue them is refused.
class Updates {
  #updates = new Map(); // update → its last attempt
  #batches = new Map(); // batch → the root of its groups
  #retractions = new Map(); // version → the retraction whose result it is
  #due = new Map(); // batch → the version of the retraction that it was formed after, if that ends with the update before
  #loaded = 0; // the last version that an update begins with
  #firstBatch = Infinity;
  #version = 0;
  last = 0;

  add(entry) {
    if (entry.kind === "version") this.#version = entry.version;
    if (entry.kind === "batch") {
      this.#batches.set(entry.number, entry.groups_root);
      const ending = [...this.#retractions.values()].filter((each) => each.last === entry.number - 1);
      this.#due.set(entry.number, Math.max(0, ...ending.map((each) => each.version)));
      this.#firstBatch = Math.min(this.#firstBatch, entry.number);
    }
    if (entry.kind === "retraction") {
      const problem = this.#retractionProblem(entry);
      if (!problem) this.#retractions.set(entry.version, entry);
      return problem;
    }
    if (entry.kind !== "update") return "";
    const problem = this.#problem(entry);
    if (problem) return problem;
    this.#updates.set(entry.update, entry);
    this.#loaded = Math.max(this.#loaded, entry.replaced_by);
    this.last = Math.max(this.last, entry.update);
    return "";
  }

  #problem(entry) {
    const [earlier, before] = [this.#updates.get(entry.update), this.#updates.get(entry.update - 1)];
    const retraction = this.#retractions.get(entry.replaced_by);
    if (entry.attempt !== (earlier?.attempt ?? 0) + 1) return `attempt ${(earlier?.attempt ?? 0) + 1} would be the next.`;
    if (retraction && entry.update !== retraction.last + 1) return `the retraction that it begins with ends with update ${retraction.last}.`;
    const due = this.#due.get(entry.update) ?? 0;
    if (entry.replaced_by < due && this.#loaded <= due) return `it does not begin with version ${due}, the result of a retraction.`;
    const isAfterRetraction = retraction || (due > 0 && entry.replaced_by >= due);
    if (!before && !earlier && !isAfterRetraction && this.#updates.size) return `update ${entry.update - 1} is not in the ledger.`;
    if (entry.replaced_by > this.#version) return "it begins with a version that is not in the ledger.";
    if (retraction && entry.before !== retraction.after) return "it does not begin with the state in which the retraction ended.";
    const state = before ? before.after : earlier ? earlier.before : entry.before;
    if (!entry.replaced_by && entry.before !== state) return "it does not begin with the state in which the one before it ended.";
    const groups = this.#batches.get(entry.update);
    if (!groups && entry.update >= this.#firstBatch) return "its batch was never formed.";
    if (groups && groups !== entry.groups_root) return "it was trained on other groups than its batch was formed of.";
    return "";
  }

  #retractionProblem(entry) {
    const before = this.#updates.get(entry.first - 1);
    if (entry.version !== this.#version) return `the last version in the ledger is ${this.#version}.`;
    if (entry.last < entry.first) return "it goes backwards.";
    if (!this.#batches.has(entry.last)) return "its last batch was never formed.";
    const states = [...this.#retractions.values()].filter((each) => each.last === entry.first - 1).map((each) => each.after);
    if (before) states.push(before.after);
    if (this.#updates.has(entry.first)) states.push(this.#updates.get(entry.first).before);
    return !states.length || states.includes(entry.before) ? "" : "it begins with a state that is not in the ledger.";
  }
}
