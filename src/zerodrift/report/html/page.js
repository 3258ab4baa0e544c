"use strict";
const field = document.getElementById("filter");
const count = document.getElementById("count");
const lines = Array.from(document.querySelectorAll("tr.line"));

function fold(line) {
  const next = line.nextElementSibling;
  if (next && next.classList.contains("unfolded")) next.remove();
}

function unfold(line) {
  const next = line.nextElementSibling;
  if (next && next.classList.contains("unfolded")) return fold(line);
  const row = document.getElementById("unfolded").content.cloneNode(true).firstElementChild;
  const why = document.getElementById("why-" + line.dataset.set).cloneNode(true);
  why.removeAttribute("id");
  row.classList.add("unfolded");
  row.firstElementChild.append(why);
  line.after(row);
}

field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const line of lines) {
    const text = line.textContent.toLowerCase();
    line.hidden = !words.every((word) => text.includes(word));
    if (line.hidden) fold(line);
    else shown += 1;
  }
  count.textContent = words.length ? shown + " of " + lines.length + " lines" : lines.length + " lines";
});

for (const line of lines) {
  line.addEventListener("click", () => {
    if (!String(window.getSelection())) unfold(line);
  });
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      unfold(line);
    }
  });
}
