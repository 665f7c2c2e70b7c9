"use strict";
// Follows the system unless the reader chose; the choice is kept where the browser allows it.
(function () {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("nexttransformer-theme"); } catch (error) { return null; } };
  function show(theme) {
    root.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  }
  show(kept() || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!kept()) show(system.matches ? "dark" : "light"); });
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    button.addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("nexttransformer-theme", theme); } catch (error) { /* Private mode: not kept. */ }
      show(theme);
    });
  });
})();
