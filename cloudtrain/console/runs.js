// The table of runs. Rows: [run id, link, name of its box, chosen, state, look of the state, created, took, loss, target].
import { h } from "vue";

export default {
  props: { heads: Array, rows: Array },
  emits: ["choose"],
  render() {
    const head = ([words, look]) => h("th", { scope: "col", class: look }, words);
    const cell = (look, words) => h("td", { class: look }, words);
    const row = ([id, link, box, chosen, state, look, created, took, loss, target]) => {
      const choose = (event) => this.$emit("choose", [id, event.target.checked]);
      return h("tr", { key: id }, [
        cell("ct-pick", [h("input", { type: "checkbox", "aria-label": box, checked: chosen, onChange: choose })]),
        cell("", [h("a", { href: link }, id)]),
        cell("", [h("span", { class: `ct-state ${look}` }, state)]),
        cell("ct-whole ct-wide ct-dim", created),
        cell("ct-number ct-wide", took),
        cell("ct-number", loss),
        cell("ct-wide", target),
      ]);
    };
    return h("table", { class: "ct-table" }, [
      h("thead", [h("tr", this.heads.map(head))]),
      h("tbody", this.rows.map(row)),
    ]);
  },
};
