"use strict";
// Sorting by the column heads and filtering by family. Without JavaScript the tables stand in their printed order.
(function () {
  function key(row, column, isNumber) {
    const cell = row.cells[column];
    const text = cell.dataset.key === undefined ? cell.textContent.trim() : cell.dataset.key;
    return isNumber ? Number(text) : text.toLowerCase();
  }

  function sort(table, head) {
    const column = head.cellIndex;
    const isNumber = head.dataset.kind === "number";
    const isDown = head.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map((row, index) => ({ row, index, value: key(row, column, isNumber) }));
    rows.sort((a, b) => {
      const order = isNumber ? a.value - b.value : a.value.localeCompare(b.value);
      return (isDown ? -order : order) || a.index - b.index;
    });
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    rows.forEach((item) => body.appendChild(item.row));
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("button.sort").forEach((button) =>
      button.addEventListener("click", () => sort(table, button.closest("th"))));
  });

  const family = document.getElementById("family");
  if (family) {
    family.addEventListener("change", () => {
      document.querySelectorAll("#board tbody tr").forEach((row) => {
        row.hidden = family.value !== "" && row.dataset.family !== family.value;
      });
    });
  }
})();
