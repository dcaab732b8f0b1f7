
// -------------------------------------------------------------------------------------------------------- the page
function show() {
  document.body.classList.toggle("empty", !D.run.starts.length && !D.log.length && !D.samples.length);
  $("samples-note").textContent = LIVE ? "" : D.notes.filter(note => !note.includes("messages")).join(" ");
  for (const part of [head, tiles, curves, stack, plugins, files, engines, log])
    try { part(); } catch (error) { $("foot").append(el("div", {class: "banner", style: "--c: var(--bad)"}, `${part.name}: ${error}`)); console.error(error); }
}
browse();
show();
addEventListener("resize", () => stack());
