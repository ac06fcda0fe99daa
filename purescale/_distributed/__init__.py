"""What ranks tell each other: flags, statistics, gradients in buckets."""
