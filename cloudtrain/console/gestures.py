"""What a person does to a chart with pointer, keys or a file, as handlers in the page that tell the console."""

DRAG = "(event) => event.dataTransfer.setData('text/plain', event.target.dataset.chart)"
DROP = "(event) => { event.preventDefault(); emit(event.dataTransfer.getData('text/plain')); }"
RESIZE = """(event) => {
  const chart = event.target.closest('.ct-chart'), plot = chart.querySelector('.js-plotly-plot');
  const grid = chart.closest('.ct-sections');
  const several = getComputedStyle(grid).gridTemplateColumns.includes(' '), whole = grid.clientWidth;
  const tell = (x, y) => emit([height + y, several ? width + x > whole * 0.75 : null]);
  const [width, height] = [chart.clientWidth, plot.clientHeight];
  if (event.type === 'keydown') {
    const by = {ArrowLeft: [-whole, 0], ArrowRight: [whole, 0], ArrowUp: [0, -40], ArrowDown: [0, 40]}[event.key];
    if (by) { event.preventDefault(); tell(...by); }
    return;
  }
  event.preventDefault();
  event.target.setPointerCapture(event.pointerId);
  event.target.onpointermove = (now) => { plot.style.height = `${height + now.clientY - event.clientY}px`; };
  event.target.onpointerup = (now) => {
    event.target.onpointermove = event.target.onpointerup = null;
    plot.style.height = '';
    tell(now.clientX - event.clientX, now.clientY - event.clientY);
  };
}"""
PICK = """() => {
  const pick = Object.assign(document.createElement('input'), {type: 'file', accept: '.json'});
  pick.onchange = async () => emit((await pick.files[0].text()).slice(0, 200000));
  pick.click();
}"""

NEAREST = """(event) => {
  const chart = event.event.target.closest('.js-plotly-plot'), axis = chart._fullLayout.yaxis;
  const y = event.event.clientY - chart.getBoundingClientRect().y - axis._offset;
  const away = (point) => Math.abs(axis.d2p(point.y) - y);
  const own = event.points.filter((point) => point.data.meta);
  if (own.length) emit(own.reduce((best, point) => (away(point) < away(best) ? point : best)).data.meta);
}"""  # a click between curves: at one x there is a point of each
