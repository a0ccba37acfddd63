// Refreshes the parts of a page that are marked `data-live`: fetches the same page again when the coordinator sends an
// event, and replaces the old parts. Without server-sent events it fetches the page every ten seconds.
//
// - The server renders and escapes everything; this script builds no markup from data.
// - An open table stays open, and the focus stays where it was. A hidden page is not fetched.
// - A page that the visitor leaves closes its event stream. The browser keeps such a page for the "back" button, and with
//   it one of the six connections that it opens to a host, so that the seventh page would wait for a minute.

const POLL_MS = 10_000;
const LISTEN_AGAIN_MS = 60_000;
const SPREAD_MS = 500; // spreads the requests of many visitors

let fetching = false;
let missed = false;
let polling;
let source;

function say(text) {
  const line = document.getElementById("live");
  if (line.textContent !== text) line.textContent = text;
}

function keep(old, fresh) {
  for (const open of old.querySelectorAll("details[open][id]")) {
    const same = fresh.querySelector(`#${CSS.escape(open.id)}`);
    if (same) same.open = true;
  }
  const href = old.contains(document.activeElement) && document.activeElement.getAttribute("href");
  const focused = old.contains(document.activeElement) && document.activeElement.closest("[id]");
  old.replaceWith(fresh);
  if (href) fresh.querySelector(`a[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
  else if (focused) document.getElementById(focused.id)?.querySelector("summary")?.focus({ preventScroll: true });
}

async function refresh() {
  if (document.hidden || fetching) {
    missed = true;
    return;
  }
  fetching = true;
  missed = false;
  try {
    const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!reply.ok) throw new Error(reply.statusText);
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(old.id);
      if (fresh && fresh.innerHTML !== old.innerHTML) keep(old, document.adoptNode(fresh));
    }
    say(polling ? "This page is refreshed every 10 seconds." : "This page refreshes itself.");
  } catch {
    say("The coordinator does not answer. Trying again.");
  } finally {
    fetching = false;
  }
  if (missed) setTimeout(refresh, SPREAD_MS);
}

function poll() {
  polling ??= setInterval(refresh, POLL_MS);
  setTimeout(listen, LISTEN_AGAIN_MS);
}

function listen() {
  source?.close();
  source = new EventSource("/v1/events");
  source.addEventListener("moment", () => {
    clearInterval(polling);
    polling = undefined;
    setTimeout(refresh, Math.random() * SPREAD_MS);
  });
  source.addEventListener("error", () => {
    say("The coordinator does not answer. Trying again.");
    if (source.readyState === EventSource.CLOSED) poll();
  });
}

document.addEventListener("visibilitychange", () => !document.hidden && missed && refresh());
if (document.querySelector("[data-live]")) {
  listen();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && listen());
}
