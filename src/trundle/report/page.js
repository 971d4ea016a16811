(() => {
  "use strict";
  document.documentElement.classList.add("script");
  const tip = document.getElementById("tip");
  const show = (mark, x, y) => {
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    if (!title) continue;
    mark.setAttribute("aria-label", title.textContent);
    mark.setAttribute("role", "img");
    title.remove();
    for (const kind of ["pointermove", "click"]) {
      mark.addEventListener(kind, (event) => show(mark, event.clientX, event.clientY));
    }
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(mark, box.right, box.top);
    });
    mark.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  const within = (choice) => [...choice.children].filter((child) => child.classList.contains("option"));
  for (const choice of document.querySelectorAll(".choice")) {
    const options = within(choice);
    const label = document.createElement("label");
    const select = document.createElement("select");
    label.className = "pick";
    label.append(choice.dataset.label, select);
    options.forEach((option, number) => select.add(new Option(option.dataset.name, number)));
    const pick = () => options.forEach((option, number) => { option.hidden = number !== Number(select.value); });
    select.addEventListener("change", pick);
    choice.prepend(label);
    pick();
  }
  for (const block of document.querySelectorAll("pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = block.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block.querySelector("code"));
        button.textContent = "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
    block.prepend(button);
  }
})();
