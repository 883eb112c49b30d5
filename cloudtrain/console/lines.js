// A window of a log. Lines: [number from 0, meta, words]; a click on a line, or on its number, goes to it where `jumps`.
// `stand` is what shall be seen of the window: its "start", its "end" (and what comes, while a person is there), or the
// line that is "marked"; it counts whenever `turn` is another one.
import { h } from "vue";

const NEAR = 40; // pixels from the end that still are the end

export default {
  props: { lines: Array, marked: Number, jumps: Boolean, stand: String, turn: Number },
  emits: ["go"],
  mounted() {
    this.look(true);
  },
  beforeUpdate() {
    const box = this.$el;
    this.atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  },
  updated() {
    this.look(this.turn !== this.seen);
  },
  methods: {
    look(turned) {
      const box = this.$el;
      this.seen = this.turn;
      if (this.stand === "end" && (turned || this.atEnd)) box.scrollTop = box.scrollHeight;
      else if (turned && this.stand === "start") box.scrollTop = 0;
      else if (turned && this.stand === "marked") {
        const line = box.querySelector(".ct-found");
        if (line) box.scrollTop += line.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
      }
    },
  },
  render() {
    const line = ([number, meta, words]) => {
      const found = number === this.marked ? "ct-line ct-found" : "ct-line";
      const go = this.jumps ? () => this.$emit("go", number) : undefined;
      const tag = this.jumps ? ["button", { class: "ct-meta ct-jump", title: "show it among its neighbours" }] : ["span", { class: "ct-meta" }];
      return h("div", { key: number, class: found, onClick: go }, [h(...tag, meta), h("span", { class: "ct-said" }, words)]);
    };
    return h("div", { class: "ct-log" }, this.lines.map(line));
  },
};
