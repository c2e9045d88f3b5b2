// On narrow screens each row of a table is shown as lines: every cell gets its column's name.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, i) => {
        if (names[i] && i) cell.dataset.label = names[i];
        if (!cell.textContent.trim() && !cell.querySelector("img")) cell.classList.add("empty");
      });
    if (names.length > 2) table.classList.add("stacked");
  }
});
