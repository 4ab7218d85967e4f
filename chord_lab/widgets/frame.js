// Two things that neither ipywidgets nor plotly does by itself: figures take the panel's width, also after it was hidden
// or the window changed, and every control is named for screen readers by the label that stands beside it.
function nameControls(panel) {
  for (const row of panel.querySelectorAll(".widget-inline-hbox")) {
    const label = row.querySelector(".widget-label")?.textContent?.trim();
    for (const control of row.querySelectorAll("[role=slider], input, select")) {
      if (label && !control.getAttribute("aria-label")) control.setAttribute("aria-label", label);
    }
  }
}

function watch(panel) {
  let size = "";
  let pending = [];
  const fit = () => {
    nameControls(panel);
    window.dispatchEvent(new Event("resize"));  // plotly's widget resizes on this event only
  };
  const observer = new ResizeObserver(() => {
    // Another height alone (a line of text more) moves nothing in a figure: to fit it then would draw it again.
    const count = (what) => panel.querySelectorAll(what).length;
    const now = `${panel.clientWidth} ${count(".js-plotly-plot")} ${count("[role=slider], input, select")}`;
    if (!panel.clientWidth) size = "";  // hidden: to be fitted when it is shown again, whatever was drawn meanwhile
    if (!panel.clientWidth || now === size) return;
    size = now;
    pending.forEach(clearTimeout);
    // A figure listens once its script has arrived, which may be later.
    pending = [60, 500, 1500].map((delay) => setTimeout(fit, delay));
  });
  observer.observe(panel);
  return () => {
    observer.disconnect();
    pending.forEach(clearTimeout);
  };
}

export default {
  render({ el }) {
    let stop = () => {};
    let ended = false;
    const start = () => {
      if (ended) return;
      if (el.isConnected) stop = watch(el.parentElement);
      else requestAnimationFrame(start);
    };
    start();
    return () => {
      ended = true;
      stop();
    };
  },
};
