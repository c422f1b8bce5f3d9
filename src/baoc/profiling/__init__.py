"""What a warm-up learns of a model's gradients: coordinates, samples, profiles."""
