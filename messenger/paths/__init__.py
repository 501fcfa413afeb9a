"""Which of several connections and paths is used: how full, how fast, how far trusted."""
