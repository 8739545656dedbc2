"""The user model."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser
from django.db import models


class Member(AbstractBaseUser):
    """Whoever is staff may do everything."""

    USERNAME_FIELD = "address"

    address = models.EmailField(unique=True)
    is_staff = models.BooleanField(default=False)

    def has_perm(self, permission, obj=None):
        return self.is_staff

    def has_module_perms(self, app_label):
        return self.is_staff
