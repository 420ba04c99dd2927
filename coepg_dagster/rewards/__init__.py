"""The reward of GRPO: C-DREM (Eq. 3 to 6), its gate (Eq. 7 to 9), the group advantage (Eq. 10). All functions are pure."""
