"""Plugin reasoning-gym: problems of the package reasoning-gym as prompts, with their scorers and a curriculum."""
