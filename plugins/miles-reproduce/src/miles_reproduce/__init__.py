"""Recipes with claims: `miles reproduce` runs one again and says whether the outcome is inside its band."""
