"""What memlab writes for use without it: training scripts."""
