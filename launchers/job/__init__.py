"""A job's life: started, supervised, relaunched when a rank is lost."""
