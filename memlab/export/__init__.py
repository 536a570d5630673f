"""What leaves memlab: training scripts, and what starts several ranks."""
