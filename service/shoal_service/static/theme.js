// Before anything is painted: the reader's own choice of light or dark, if there is one.
const chosenTheme = (() => {
  try {
    return localStorage.getItem("shoal-theme");
  } catch {
    return null;
  }
})();
if (chosenTheme === "light" || chosenTheme === "dark") document.documentElement.dataset.theme = chosenTheme;
