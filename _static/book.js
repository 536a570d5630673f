// A page opened from the disk may not read other pages, so search shows titles without excerpts there.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// A table, a figure or code that is wider than the column scrolls inside its box. Say so beside it.
(() => {
  const WIDE = "article.bd-article :is(table, .cell_output pre, figure, .output, .cell_output, .math, .pst-scrollable-table-container)";
  const look = () => {
    document.querySelectorAll(WIDE).forEach((box) => {
      const scrolls = getComputedStyle(box).overflowX === "auto" && box.scrollWidth > box.clientWidth + 1;
      if (scrolls === box.hasAttribute("data-scrolls")) return;
      box.toggleAttribute("data-scrolls", scrolls);
      if (!scrolls) {
        box.removeAttribute("tabindex");
        return box.nextElementSibling?.matches(".scroll-cue") && box.nextElementSibling.remove();
      }
      box.tabIndex = 0; // so that arrow keys move it
      const cue = document.createElement("p");
      cue.className = "scroll-cue";
      cue.textContent = "wider than the page: scroll it sideways \u2192";
      box.after(cue);
    });
  };
  let soon;
  const later = () => (clearTimeout(soon), (soon = setTimeout(look, 50)));
  addEventListener("load", look);
  addEventListener("resize", later);
  document.addEventListener("toggle", later, true); // folded boxes have no width
})();

// Columns of numbers in a cell's output stand at the right, with their heads.
addEventListener("DOMContentLoaded", () => {
  const NUMBER = /^[+\u2212-]?\d[\d.,]*(e[+-]\d+)?(\u2013\d[\d.,]*)?\s?[%\u00d7x]?$/;
  // From the right: at the left a cell may stand for several rows.
  const cellsOf = (row, i) => [...row.cells].filter((cell, at, all) => all.length - 1 - at === i && cell.colSpan === 1);
  document.querySelectorAll("div.cell_output table").forEach((table) => {
    const rows = [...table.rows], data = rows.filter((row) => row.querySelector("td"));
    for (let i = 0; i < (data[0]?.cells.length ?? 0); i++) {
      const said = data.flatMap((row) => cellsOf(row, i)).map((cell) => cell.textContent.trim());
      const told = said.filter((text) => text && text !== "\u2014");
      if (!told.length || !told.every((text) => NUMBER.test(text))) continue;
      rows.flatMap((row) => cellsOf(row, i)).forEach((cell) => cell.classList.add("number"));
    }
  });
});

// What fits where: a cell's colour is that of the way it names (custom.css).
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("#what-fits-where td").forEach((cell) => {
    const way = cell.textContent.trim().match(/^(full|LoRA|QLoRA) /);
    if (way) cell.dataset.way = way[1];
  });
});

// Paper is white: a page is printed in the light theme, whichever the screen has.
(() => {
  const page = document.documentElement;
  let theme;
  addEventListener("beforeprint", () => ((theme = page.dataset.theme), (page.dataset.theme = "light")));
  addEventListener("afterprint", () => (page.dataset.theme = theme));
})();
