// Copies a command at the press of a button, and shows a chart's figures below the pointer.
//
// - Without this script the commands can be selected, and each chart has its figures as a table.
// - The figures are those of the table: nothing is computed again, and no markup is built from data.

for (const button of document.querySelectorAll("button[data-copy]")) {
  if (!navigator.clipboard) continue; // only over https or on this machine
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

const tip = document.createElement("output");
tip.className = "tip";
tip.setAttribute("aria-hidden", "true");

function nearest(svg, share) {
  const points = [...svg.querySelector("polyline").points];
  let best = 0;
  points.forEach((point, place) => {
    if (Math.abs(point.x - 100 * share) < Math.abs(points[best].x - 100 * share)) best = place;
  });
  return [best, points[best], points.length];
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.(".plot svg");
  const rows = svg?.closest("figure").querySelectorAll("tbody tr");
  if (!svg?.querySelector("polyline")) return tip.remove();
  const box = svg.getBoundingClientRect();
  const [place, point, count] = nearest(svg, (event.clientX - box.left) / box.width);
  if (rows.length !== count) return tip.remove();
  const cells = [...rows[place].children].map((cell) => cell.textContent);
  const heads = [...svg.closest("figure").querySelectorAll("thead th")].map((cell) => cell.textContent);
  tip.textContent = `${heads[0]} ${cells[0]}: ${cells.slice(1).join(", ")}`;
  if (tip.parentElement !== svg.parentElement) svg.parentElement.append(tip);
  const frame = svg.parentElement.getBoundingClientRect();
  const half = tip.offsetWidth / 2;
  const x = box.left - frame.left + (point.x / 100) * box.width;
  tip.style.left = `${Math.min(Math.max(x, half), frame.width - half)}px`;
  tip.style.top = `${box.top - frame.top + (point.y / 100) * box.height}px`;
});
