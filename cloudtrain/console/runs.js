// A table of runs or of groups of them. Heads: [text, look, column to sort by or "", "ascending" | "descending" | "none"].
// A box above the boxes chooses all rows; a click with Shift all from the last one. Emits choose ([keys, chosen]) and sort.
// Rows: [key, name of its box or "", chosen, cells]; a cell: [look, text, link or "", look of a state or "", tags, note or ""].
import { h } from "vue";

const ARROWS = { ascending: " ↑", descending: " ↓", none: "" };

export default {
  props: { heads: Array, rows: Array },
  emits: ["choose", "sort"],
  render() {
    const boxes = this.rows.filter((row) => row[1]);
    const whole = boxes.length > 0 && boxes.every((row) => row[2]);
    const choose = (rows, chosen) => this.$emit("choose", [rows.map((row) => row[0]), chosen]);
    const head = ([words, look, column, sorted]) => {
      if (words === "choose") {
        const all = (event) => choose(boxes, event.target.checked);
        return h("th", { scope: "col", class: "ct-pick" }, [
          h("input", { type: "checkbox", "aria-label": "choose all rows", checked: whole, onChange: all }),
        ]);
      }
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
      const pick = (event) => {
        const [at, last] = [key, event.shiftKey && this.last ? this.last : key].map((each) => boxes.findIndex((row) => row[0] === each));
        this.last = key;
        choose(boxes.slice(Math.max(Math.min(at, last), 0), Math.max(at, last) + 1), event.target.checked);
      };
      const input = () => h("input", { type: "checkbox", "aria-label": box, checked: chosen, onClick: pick });
      return h("tr", { key }, [...(box ? [h("td", { class: "ct-pick" }, [input()])] : []), ...cells.map(cell)]);
    };
    return h("table", { class: "ct-table" }, [
      h("thead", [h("tr", this.heads.map(head))]),
      h("tbody", this.rows.map(row)),
    ]);
  },
};
