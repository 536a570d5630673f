// The ledger of claims can be put in three orders. Without this script it stands in that of the sources.
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.ledger")) {
    const rows = [...table.tBodies[0].rows];
    const headings = rows.filter((row) => row.matches(".source"));
    const others = rows.filter((row) => !row.matches(".source"));
    const bar = document.createElement("p");
    bar.className = "ledger-order";
    bar.textContent = "Order by ";
    for (const key of ["source", "verdict", "chapter"]) {
      const button = bar.appendChild(document.createElement("button"));
      button.textContent = key;
      button.setAttribute("aria-pressed", key === "source");
      button.onclick = () => {
        const sorted = others.toSorted((a, b) => a.dataset[key] - b.dataset[key]);
        table.tBodies[0].append(...(key === "source" ? rows : sorted));
        headings.forEach((row) => (row.hidden = key !== "source"));
        bar.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", b === button));
      };
    }
    table.before(bar);
  }
});
