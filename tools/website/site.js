// Search, theme, menu and copy buttons. Every page is complete without this script.
"use strict";

const theme = document.getElementById("theme");
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* private mode */ }
});

const menu = document.getElementById("menu");
menu.addEventListener("click", () => {
  const isOpen = document.getElementById("navigation").classList.toggle("is-open");
  menu.setAttribute("aria-expanded", String(isOpen));
});

const list = document.getElementById("navigation");
const here = list.querySelector("[aria-current]");
list.scrollTop = here.offsetTop - list.clientHeight / 2;  // the page that is shown, where the list is longer than the screen

for (const block of document.querySelectorAll("pre.code")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const commands = [...block.querySelectorAll(".command")].map((each) => each.textContent);
    const text = commands.length ? commands.join("\n") : block.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch (error) {
      const range = document.createRange();
      range.selectNodeContents(block.querySelector("code"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const frame = document.createElement("div");
  frame.className = "copyable";
  block.replaceWith(frame);
  frame.append(block, button);
}

const input = document.getElementById("search");
const results = document.getElementById("results");
let chosen = -1;

function score(words, [, title, heading, text]) {
  const [inTitle, inHeading, inText] = [title, heading, text].map((each) => each.toLowerCase());
  let sum = 0;
  for (const word of words) {
    const found = (inTitle.includes(word) ? 8 : 0) + (inHeading.includes(word) ? 12 : 0) +
      Math.min(inText.split(word).length - 1, 4);
    if (!found) return 0;
    sum += found;
  }
  return sum;
}

function excerpt(words, text) {
  const before = Math.max(0, text.toLowerCase().indexOf(words[0]) - 40);
  const place = before ? text.indexOf(" ", before) + 1 : 0;
  const end = text.indexOf(" ", place + 130);
  return (place ? "... " : "") + (end > 0 ? `${text.slice(place, end)} ...` : text.slice(place));
}

function show() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = !words.length ? [] : window.searchIndex
    .map((each) => [score(words, each), each]).filter(([points]) => points)
    .sort((one, other) => other[0] - one[0]).slice(0, 10);
  results.replaceChildren(...found.map(([, [address, title, heading, text]], number) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    const small = document.createElement("small");
    item.id = `result-${number}`;
    item.setAttribute("role", "option");
    link.href = address;
    link.tabIndex = -1;
    link.textContent = heading === title ? title : `${title}: ${heading}`;
    small.textContent = excerpt(words, text);
    link.append(small);
    item.append(link);
    return item;
  }));
  if (words.length && !found.length) {
    const item = document.createElement("li");
    item.textContent = "No page has all of these words.";
    results.append(item);
  }
  results.hidden = !words.length;
  input.setAttribute("aria-expanded", String(!results.hidden));
  choose(found.length ? 0 : -1);
}

function choose(number) {
  chosen = number;
  [...results.children].forEach((item, place) => {
    item.setAttribute("aria-selected", String(place === number));
    if (place === number) item.scrollIntoView({ block: "nearest" });
  });
  if (number < 0) input.removeAttribute("aria-activedescendant");
  else input.setAttribute("aria-activedescendant", `result-${number}`);
}

input.addEventListener("input", show);
input.addEventListener("keydown", (event) => {
  const count = results.querySelectorAll("a").length;
  if (event.key === "ArrowDown" && count) choose((chosen + 1) % count);
  else if (event.key === "ArrowUp" && count) choose((chosen + count - 1) % count);
  else if (event.key === "Enter" && chosen >= 0) results.children[chosen].querySelector("a").click();
  else if (event.key === "Escape") { input.value = ""; show(); input.blur(); }
  else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".search")) results.hidden = true;
  if (event.target.closest("#results a")) results.hidden = true;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) {
    event.preventDefault();
    input.focus();
  }
});
