"""Why a login or a session came to nothing: one leaf per cause. No message quotes what came."""

from app.auth.principal import Principal
from app.auth.tokens.errors import PermissionDenied, TokenMissing
from app.domain.errors import InvalidArgument


class SessionEnded(TokenMissing):
    """Logged out, expired, or never there. To be challenged as who shows nothing."""

    reason = "SESSION_ENDED"
    description = "The session is over: log in again."


class CrossSiteRefused(PermissionDenied):
    """A session's cookie came with a request that this gateway's own pages would not send."""

    reason = "CROSS_SITE_REFUSED"


class LoginRefused(InvalidArgument):
    """A login that does not come to a session."""

    reason = "LOGIN_FAILED"


class ReturnRefused(LoginRefused):
    reason = "RETURN_TO_REFUSED"

    def __init__(self) -> None:
        super().__init__("After a login, only paths of this gateway are gone back to.")


class LoginIssuerUnknown(LoginRefused):
    reason = "LOGIN_ISSUER_UNKNOWN"

    def __init__(self) -> None:
        super().__init__("Nobody logs in here with that issuer.")


class LoginUnknown(LoginRefused):
    """No such login is under way in this browser: forged, another browser's, or too late."""

    reason = "LOGIN_UNKNOWN"

    def __init__(self) -> None:
        super().__init__("No such login is under way in this browser. Begin anew.")


class LoginReplayed(LoginRefused):
    reason = "LOGIN_REPLAYED"

    def __init__(self) -> None:
        super().__init__("This login has come back before. Begin anew.")


class LoginMixedUp(LoginRefused):
    """RFC 9207: the answer is not by the issuer that was asked."""

    reason = "LOGIN_ISSUER_MISMATCH"

    def __init__(self) -> None:
        super().__init__("The answer does not come from the issuer that the login began with.")


class LoginDenied(LoginRefused):
    """The issuer says no. `error`: its code, of RFC 6749 section 4.1.2.1 or OpenID Connect."""

    reason = "LOGIN_DENIED"

    def __init__(self, error: str) -> None:
        super().__init__("The issuer did not log you in.")
        self.error = error


class LoginFailed(LoginRefused):
    """The issuer's answer is no good. `why`: for the operator, in words of our own."""

    def __init__(self, why: str) -> None:
        super().__init__("The issuer's answer could not be used. The gateway's log says why.")
        self.why = why


class LoginForbidden(PermissionDenied):
    """The login was good, and its token may administer nothing here: there is no session."""

    reason = "LOGIN_FORBIDDEN"

    def __init__(self, who: Principal) -> None:
        super().__init__("Your account has no administrative permission here.")
        self.who = who


class LogoutTokenRefused(InvalidArgument):
    """OpenID Connect Back-Channel Logout 1.0 section 2.6."""

    reason = "LOGOUT_TOKEN_REFUSED"

    def __init__(self, why: str) -> None:
        super().__init__(f"The logout token was not accepted: {why}.")
