"""What report files say: summaries, comparisons, and why a step was slow. Nothing needs torch."""
