// A table of runs or of groups of them. Heads: [text, look, column to sort by or "", "ascending" | "descending" | "none"].
// Rows: [key, name of its box or "", chosen, cells]; a cell: [look, text, link or "", look of a state or "", tags, note or ""].
import { h } from "vue";

const ARROWS = { ascending: " ↑", descending: " ↓", none: "" };

export default {
  props: { heads: Array, rows: Array },
  emits: ["choose", "sort"],
  render() {
    const head = ([words, look, column, sorted]) => {
      const sort = () => this.$emit("sort", column);
      const button = () => h("button", { class: "ct-sort", type: "button", onClick: sort }, words + ARROWS[sorted]);
      return h("th", { scope: "col", class: look, "aria-sort": column ? sorted : undefined }, column ? [button()] : words);
    };
    const cell = ([look, words, link, state, tags, note]) => {
      const shown = link ? h("a", { href: link }, words) : state ? h("span", { class: `ct-state ${state}` }, words) : words;
      const marks = (tags || []).map((tag) => h("span", { class: "ct-tag" }, tag));
      return h("td", { class: look }, [shown, ...marks, ...(note ? [h("div", { class: "ct-note" }, note)] : [])]);
    };
    const row = ([key, box, chosen, cells]) => {
      const choose = (event) => this.$emit("choose", [key, event.target.checked]);
      const input = () => h("input", { type: "checkbox", "aria-label": box, checked: chosen, onChange: choose });
      return h("tr", { key }, [...(box ? [h("td", { class: "ct-pick" }, [input()])] : []), ...cells.map(cell)]);
    };
    return h("table", { class: "ct-table" }, [
      h("thead", [h("tr", this.heads.map(head))]),
      h("tbody", this.rows.map(row)),
    ]);
  },
};
