// The runs of a comparison. Rows: [id, label, link, short name, colour, state, look of the state, hidden, is the baseline].
// Emits hide, only, baseline (an id) and colour ([id, "#rrggbb"]).
import { h } from "vue";

export default {
  props: { rows: Array },
  emits: ["hide", "only", "baseline", "colour"],
  render() {
    const row = ([id, label, link, short, colour, state, look, hidden, base]) => {
      const button = (words, name, pressed) =>
        h("button", { class: "ct-sort", type: "button", "aria-pressed": pressed, "aria-label": `${words} ${label}`, onClick: () => this.$emit(name, id) }, words);
      const pick = (event) => this.$emit("colour", [id, event.target.value]);
      return h("li", { key: id, class: hidden ? "ct-row ct-off" : "ct-row" }, [
        h("input", { type: "color", class: "ct-swatch", value: colour, "aria-label": `colour of ${label}`, onChange: pick }),
        h("div", [
          h("a", { href: link }, label),
          short !== label ? h("span", { class: "ct-dim ct-small" }, short) : null,
          h("span", { class: `ct-state ${look}` }, state),
          h("span", { class: "ct-legend-tools ct-small ct-dim" }, [
            button("hide", "hide", hidden),
            button("only", "only"),
            button("baseline", "baseline", base),
          ]),
        ]),
      ]);
    };
    return h("ul", { class: "ct-legend" }, this.rows.map(row));
  },
};
