/* Where an MPI listens: preloaded into its launcher and the ranks, it stands before bind(). Open MPI and MPICH bind
 * their sockets to every interface, whatever their own parameters include; here they go to LADDERTRON_LISTEN instead:
 * the first of its interfaces (names, commas between) that this host has with an address of the family. Sockets that name
 * an address themselves are left alone. One whose family no such interface has goes to loopback: Open MPI gives TCP up
 * altogether where it cannot listen by IPv6. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

typedef int (*lt_bind)(int, const struct sockaddr *, socklen_t);

/* Puts an interface's address in place of the wildcard one; 0 where it has none. */
static int lt_take(const struct ifaddrs *all, const char *name, size_t length, struct sockaddr_storage *address) {
    for (const struct ifaddrs *one = all; one; one = one->ifa_next) {
        if (!one->ifa_addr || one->ifa_addr->sa_family != address->ss_family) continue;
        if (strlen(one->ifa_name) != length || strncmp(one->ifa_name, name, length)) continue;
        if (address->ss_family == AF_INET) {
            ((struct sockaddr_in *)address)->sin_addr = ((struct sockaddr_in *)one->ifa_addr)->sin_addr;
        } else {
            const struct sockaddr_in6 *have = (const struct sockaddr_in6 *)one->ifa_addr;
            ((struct sockaddr_in6 *)address)->sin6_addr = have->sin6_addr;
            ((struct sockaddr_in6 *)address)->sin6_scope_id = have->sin6_scope_id;
        }
        return 1;
    }
    return 0;
}

/* 0 where no interface has such an address: then it is loopback's. */
static int lt_narrow(const char *names, struct sockaddr_storage *address) {
    struct ifaddrs *all = NULL;
    int found = 0;
    if (address->ss_family == AF_INET) ((struct sockaddr_in *)address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else ((struct sockaddr_in6 *)address)->sin6_addr = in6addr_loopback;
    if (getifaddrs(&all) != 0) return 0;
    while (*names && !found) {
        size_t length = strcspn(names, ",");
        found = lt_take(all, names, length, address);
        names += length + (names[length] == ',');
    }
    freeifaddrs(all);
    return found;
}

/* A socket of both families, as torch opens, is met by IPv4 where there is any: it cannot have an address of each. */
static int lt_mapped(int descriptor, const char *names, struct sockaddr_storage *address) {
    struct sockaddr_storage four = {.ss_family = AF_INET};
    struct in6_addr *at = &((struct sockaddr_in6 *)address)->sin6_addr;
    int only = 1;
    socklen_t size = sizeof only;
    if (address->ss_family != AF_INET6 || getsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &only, &size) != 0 || only)
        return 0;
    if (!lt_narrow(names, &four)) return 0;
    at->s6_addr[10] = at->s6_addr[11] = 0xff;
    memcpy(at->s6_addr + 12, &((struct sockaddr_in *)&four)->sin_addr, 4);
    return 1;
}

static int lt_wildcard(const struct sockaddr *address, socklen_t length) {
    if (address && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in))
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr == htonl(INADDR_ANY);
    if (address && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6))
        return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
    return 0;
}

int bind(int descriptor, const struct sockaddr *address, socklen_t length) {
    lt_bind next = (lt_bind)dlsym(RTLD_NEXT, "bind");
    const char *names = getenv("LADDERTRON_LISTEN");
    struct sockaddr_storage own;
    if (!names || !*names || !lt_wildcard(address, length) || length > sizeof own)
        return next(descriptor, address, length);
    memset(&own, 0, sizeof own);
    memcpy(&own, address, length);
    if (!lt_mapped(descriptor, names, &own)) lt_narrow(names, &own);
    int done = next(descriptor, (struct sockaddr *)&own, length);
    if (done != 0 && errno == EADDRNOTAVAIL && own.ss_family == AF_INET6) {
        /* without even ::1 the host has no address by which anybody could come, but for IPv4's */
        int only = 1;
        if (setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only) != 0) return -1;
        return next(descriptor, address, length);
    }
    return done;
}
