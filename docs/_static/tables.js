// On narrow screens each row of a table that does not fit is shown as lines: every cell gets its
// column's name. Tables of more than two columns do not fit anywhere; others are measured.

// Long names may break behind their dots, colons, slashes and underscores, and before the words of
// a NameOfSeveralWords.
const allowBreaks = (cell) => {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (texts.nextNode()) nodes.push(texts.currentNode);
  for (const node of nodes) {
    const parts = node.data.split(/(?<=\w{3}[.:/_])(?=\w{3})|(?<=[a-z]{2})(?=[A-Z][a-z]{2})/);
    if (parts.length > 1)
      node.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }
};

document.addEventListener("DOMContentLoaded", () => {
  const tables = document.querySelectorAll("article table.docutils");
  for (const table of tables) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, i) => {
        if (names[i] && i) cell.dataset.label = names[i];
        if (i) allowBreaks(cell);
        if (!cell.textContent.trim() && !cell.querySelector("img")) cell.classList.add("empty");
      });
    if (names.length > 2) table.classList.add("stacked");
  }
  const measure = () => {
    for (const table of tables)
      if (table.offsetWidth > table.parentElement.clientWidth) table.classList.add("stacked");
  };
  measure();
  addEventListener("resize", measure);
});
