"""Real web pages for the embedded benchmark: MiniWoB++ in headless Chromium, solved by DOM oracles."""
