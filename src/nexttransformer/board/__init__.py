"""The leaderboard: records in `evidence/` to static pages. Equal records give equal bytes."""
