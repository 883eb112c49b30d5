// A chart of plotly.js, with the props of NiceGUI's own. That one (3.18) also watches the size of a chart that was removed
// while plotly.js was loading: plotly.js refuses to resize it, and nothing ever stops the watching.
export default {
  template: "<div></div>",
  props: { options: Object },
  emits: ["plotly_click"],
  async mounted() {
    const { Plotly } = await import("nicegui-plotly");
    if (this.removed) return;
    this.Plotly = Plotly;
    this.update();
    this.$el.on("plotly_click", (event) => this.$emit("plotly_click", event));
    this.sizes = new ResizeObserver(() => Plotly.Plots.resize(this.$el));
    this.sizes.observe(this.$el);
  },
  unmounted() {
    this.removed = true;
    this.sizes?.disconnect();
  },
  methods: {
    update() {
      this.Plotly?.react(this.$el, this.options, this.options.config);
    },
  },
};
