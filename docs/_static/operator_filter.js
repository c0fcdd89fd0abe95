// Puts a search field above every operator table: rows show when all words typed occur in them.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.operator-table")) {
    const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
    const field = document.createElement("input");
    const count = document.createElement("output");
    field.type = "search";
    field.className = "operator-filter";
    field.placeholder = "Filter by name, rule or reason, as in: concat, or: fp32 kernel";
    field.setAttribute("aria-label", "Filter the operators");
    const filter = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const [row, text] of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    };
    field.addEventListener("input", filter);
    table.parentNode.insertBefore(field, table);
    table.parentNode.insertBefore(count, table);
    filter();
  }
});
