"""The reward of GRPO: C-DREM (Eq. 3 to 6), its gate (Eq. 7 to 9) and the group advantage (Eq. 10), as pure functions."""
