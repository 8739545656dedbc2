"""Streams in Django's admin, with their chunks beside them.

Invariant: no page costs more because there are many streams or chunks. Nothing is counted without a bound,
no payload is loaded whole, and nobody's request hangs behind a writer's long transaction.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import router, transaction
from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from . import conf, previews, store
from .exceptions import StreamBusy, StreamClosed, StreamMissing
from .models import Chunk, Stream

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Stream]
    _Paginator = Paginator[Stream]
else:
    _ModelAdmin, _Paginator = admin.ModelAdmin, Paginator

_MIN_LOCK_TIMEOUT_SECONDS = 0.01
"""For each stream that an action still has to do after its time has run out."""


class CappedPaginator(_Paginator):
    """Lists the first `max_count` rows and counts no further, however many there are."""

    max_count = 10_000

    @cached_property
    def count(self) -> int:
        """The rows listed."""
        return min(self._found, self.max_count)

    @property
    def capped(self) -> bool:
        """Whether there are more rows than listed."""
        return self._found > self.max_count

    @cached_property
    def _found(self) -> int:
        rows = self.object_list
        if isinstance(rows, QuerySet):
            return rows.order_by()[: self.max_count + 1].count()
        return len(rows)


class StreamAdmin(_ModelAdmin):
    """The admin of streams. To change it, unregister `Stream` and register it with a subclass."""

    chunks_per_page = 50
    preview_characters = 400
    """Of a payload. So many on so many chunks stay below 200 KB of HTML even if all are escaped."""
    max_action_streams = 500
    """An action on more than that is refused: it could not end within a request."""
    cancel_reason = _("cancelled by an administrator")
    """What subscribers are told about a stream that was cancelled here."""

    list_display = ("key", "owner", "state_badge", "stored_chunks", "last_append")
    list_select_related = ("owner",)
    list_filter = ("state", "created_at", "appended_at")
    search_fields = ("key", f"owner__{get_user_model().USERNAME_FIELD}")
    search_help_text = _("By key or owner")
    # By the primary key: the order that costs nothing.
    ordering = ("-pk",)
    paginator = CappedPaginator
    show_full_result_count = False
    # Each facet is a count over the whole table.
    show_facets = admin.ShowFacets.NEVER
    # A drop-down would hold every user.
    raw_id_fields = ("owner",)
    actions = ("close_selected", "cancel_selected")
    change_form_template = "admin/pgstreams/stream/change_form.html"

    class Media:
        css = {"all": ("pgstreams/admin.css",)}

    # What is shown ---------------------------------------------------------------------------------

    @admin.display(description=_("state"), ordering="state")
    def state_badge(self, stream: Stream) -> str:
        return format_html(
            '<span class="pgs-state pgs-{}" title="{}">{}</span>',
            stream.state,
            stream.reason,
            stream.get_state_display(),
        )

    @admin.display(description=_("chunks"), ordering=F("next_offset") - F("first_offset"))
    def stored_chunks(self, stream: Stream) -> int:
        """By the stream's own counters."""
        return stream.next_offset - stream.first_offset

    @admin.display(description=_("last append"), ordering=F("appended_at").asc(nulls_first=True))
    def last_append(self, stream: Stream) -> Any:
        return stream.appended_at

    def get_readonly_fields(self, request: HttpRequest, obj: Stream | None = None) -> tuple[Any, ...]:
        """What is declared, and everything that only the app's own statements write."""
        managed = [field.name for field in self.opts.fields if not field.editable]
        # Another content type would make nonsense of the chunks that are stored.
        fixed = [] if obj is None else ["content_type"]
        declared = super().get_readonly_fields(request, obj)
        return tuple(dict.fromkeys([*declared, *managed, *fixed, "state_badge", "stored_chunks"]))

    def get_fieldsets(self, request: HttpRequest, obj: Stream | None = None) -> Any:
        if self.fieldsets or self.fields:
            return super().get_fieldsets(request, obj)
        editable = (None, {"fields": ("key", "owner", "content_type", "metadata", "expires_at")})
        if obj is None:
            return [editable]
        state = ["state_badge", "reason"] if obj.reason else ["state_badge"]
        managed = {
            "classes": ("pgs-managed",),
            "fields": (
                (*state, "stored_chunks", "first_offset", "next_offset"),
                ("created_at", "appended_at", "closed_at", "epoch"),
            ),
        }
        return [(_("State"), managed), editable]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        stream = context.get("original")
        if stream is not None:
            context["chunk_page"] = previews.page(
                stream,
                request.GET,
                max_chunks=self.chunks_per_page,
                max_characters=self.preview_characters,
            )
            context["last_offset"] = stream.next_offset - 1
            context["kept_query"] = [
                item for item in request.GET.items() if item[0] != previews.FROM_PARAMETER
            ]
            context["can_end"] = stream.state == Stream.State.OPEN and self.has_change_permission(
                request, stream
            )
        return super().render_change_form(request, context, *args, **kwargs)

    # Ending streams --------------------------------------------------------------------------------

    @admin.action(permissions=["change"], description=_("Close selected %(verbose_name_plural)s (completed)"))
    def close_selected(self, request: HttpRequest, queryset: QuerySet[Stream]) -> None:
        self._end(request, queryset, gettext("Closed."), Stream.close)

    @admin.action(permissions=["change"], description=_("Cancel selected %(verbose_name_plural)s"))
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Stream]) -> None:
        cancel = functools.partial(Stream.cancel, reason=str(self.cancel_reason))
        self._end(request, queryset, gettext("Cancelled."), cancel)

    def _end(
        self, request: HttpRequest, queryset: QuerySet[Stream], entry: str, end: Callable[..., None]
    ) -> None:
        """End each stream that is open, waiting for all locks together as long as for one; say how many."""
        streams = list(queryset.order_by("pk"))
        if not all(self.has_change_permission(request, stream) for stream in streams):
            raise PermissionDenied
        deadline = time.monotonic() + conf.get().LOCK_TIMEOUT_SECONDS
        done = ended = busy = 0
        for stream in streams:
            left = max(deadline - time.monotonic(), _MIN_LOCK_TIMEOUT_SECONDS)
            try:
                end(stream, lock_timeout_seconds=left)
            except (StreamClosed, StreamMissing):
                ended += 1
            except StreamBusy:
                busy += 1
            else:
                done += 1
                self.log_change(request, stream, entry)
        self._report(request, done, ended, busy)

    def _report(self, request: HttpRequest, done: int, ended: int, busy: int) -> None:
        if done:
            text = ngettext("%(n)d stream was ended.", "%(n)d streams were ended.", done)
            self.message_user(request, text % {"n": done}, messages.SUCCESS)
        if ended:
            text = ngettext(
                "%(n)d stream was skipped: it had ended already.",
                "%(n)d streams were skipped: they had ended already.",
                ended,
            )
            self.message_user(request, text % {"n": ended}, messages.WARNING)
        if busy:
            text = ngettext(
                "%(n)d stream is busy: another transaction holds it. Try again.",
                "%(n)d streams are busy: other transactions hold them. Try again.",
                busy,
            )
            self.message_user(request, text % {"n": busy}, messages.ERROR)

    def get_urls(self) -> list[URLPattern]:
        end = path(
            "<path:object_id>/end/",
            self.admin_site.admin_view(self.end_view),
            name=f"{self.opts.app_label}_{self.opts.model_name}_end",
        )
        return [end, *super().get_urls()]

    def end_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The button on a stream's page: one of the two actions, on this stream."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        ends = {"close_selected": self.close_selected, "cancel_selected": self.cancel_selected}
        stream = self.get_object(request, unquote(object_id))
        end = ends.get(request.POST.get("action", ""))
        if stream is not None and end is not None:
            if not self.has_change_permission(request, stream):
                raise PermissionDenied
            end(request, self.get_queryset(request).filter(pk=stream.pk))
        return HttpResponseRedirect(self._address("change", object_id))

    def _address(self, view: str, *args: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    # Bounds on actions, deletions and saving -------------------------------------------------------

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Stream], *args: Any, **kwargs: Any
    ) -> HttpResponse | None:
        """Django's, on a bounded number of streams; a deletion happens with its log entries or not at all."""
        if request.POST.get("select_across", "0") != "0":
            pks = list(queryset.values_list("pk", flat=True)[: self.max_action_streams + 1])
            if len(pks) > self.max_action_streams:
                text = gettext(
                    "Nothing was changed: an action takes at most %(limit)d streams. "
                    "Search or filter first, or go page by page."
                )
                self.message_user(request, text % {"limit": self.max_action_streams}, messages.ERROR)
                return None
            queryset = queryset.filter(pk__in=pks)
        deleting = "delete_selected" in request.POST.getlist("action")
        using = router.db_for_write(self.model)
        with transaction.atomic(using=using) if deleting else contextlib.nullcontext():
            return super().response_action(request, queryset, *args, **kwargs)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Django's, and the number of chunks that would go with the streams; no chunk is looked at."""
        to_delete, counts, forbidden, protected = super().get_deleted_objects(objs, request)
        chunks = sum(self.stored_chunks(stream) for stream in objs)
        counts = {**counts, str(Chunk._meta.verbose_name_plural): chunks}
        return to_delete, counts, forbidden, protected

    def save_model(self, request: HttpRequest, obj: Stream, form: Any, change: bool) -> None:
        with self._bounded_wait(obj.key):
            super().save_model(request, obj, form, change)

    def delete_model(self, request: HttpRequest, obj: Stream) -> None:
        with self._bounded_wait(obj.key):
            super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Stream]) -> None:
        with self._bounded_wait(""):
            super().delete_queryset(request, queryset)

    def _bounded_wait(self, key: str) -> contextlib.AbstractContextManager[None]:
        using = router.db_for_write(self.model)
        return store.bounded_wait(using, key, conf.get().LOCK_TIMEOUT_SECONDS)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        view = functools.partial(super().changelist_view, request, extra_context)
        return self._answer(request, view)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        view = functools.partial(super().changeform_view, request, object_id, form_url, extra_context)
        return self._answer(request, view)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        view = functools.partial(super().delete_view, request, object_id, extra_context)
        return self._answer(request, view)

    def _answer(self, request: HttpRequest, view: Callable[[], HttpResponse]) -> HttpResponse:
        """The view's answer, or a message that a stream is busy or gone: no fault of the server's."""
        try:
            return view()
        except StreamBusy:
            address = request.get_full_path()
            text = gettext(
                "Nothing was changed: another transaction, such as a writer's, holds the stream. Try again."
            )
        except StreamMissing:
            address = self._address("changelist")
            text = gettext("Nothing was changed: the stream has been deleted meanwhile.")
        self.message_user(request, text, messages.ERROR)
        return HttpResponseRedirect(address)


admin.site.register(Stream, StreamAdmin)
