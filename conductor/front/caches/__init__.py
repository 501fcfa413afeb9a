"""Context caches: beginnings of prompts that clients have stored."""
