// Refreshes the figures of the page, and moves each slider with its number. Without this script everything works: the
// page shows the moment at which it was loaded, and a slider is a second way to type its number.
//
// - The server renders and escapes everything; this script builds no markup from data.
// - Only parts marked `data-live` change. Nobody types there; what is focused or scrolled stays as it is.
// - A hidden page is not fetched.

const EVERY_MS = 1000 * Number(document.body.parentElement.dataset.refreshS);
const fresh = document.getElementById("fresh");
let fetching = false;

function say(text) {
  if (fresh.textContent !== text) fresh.textContent = text;
}

function replace(old, part) {
  if (old.innerHTML === part.innerHTML) return;
  const box = old.closest(".log");
  const atEnd = box && box.scrollHeight - box.scrollTop - box.clientHeight < 8;
  const focused = old.contains(document.activeElement) && document.activeElement;
  const place = focused && [...old.querySelectorAll("a, [tabindex]")].indexOf(focused);
  old.replaceChildren(...document.adoptNode(part).childNodes);
  if (focused) [...old.querySelectorAll("a, [tabindex]")][place]?.focus({ preventScroll: true });
  if (atEnd) box.scrollTop = box.scrollHeight;
}

async function refresh() {
  if (document.hidden || fetching) return;
  fetching = true;
  try {
    const reply = await fetch(".", { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(10_000) });
    if (!reply.ok) return say("This page is closed. Run swarm-node open for a new address.");
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const part = page.getElementById(old.id);
      if (part) replace(old, part);
    }
    say(`Updated at ${new Date().toLocaleTimeString()}.`);
  } catch {
    say("The agent does not answer. It may have ended: swarm-node status says why.");
  } finally {
    fetching = false;
  }
}

for (const slider of document.querySelectorAll("input[type=range]")) {
  const number = slider.parentElement.querySelector("input[type=number]");
  slider.addEventListener("input", () => (number.value = slider.value));
  number.addEventListener("input", () => (slider.value = number.value || 0));
}

const box = document.querySelector(".log");
box.scrollTop = box.scrollHeight;
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
refresh();
