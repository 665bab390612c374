/* Data that the engine and Python share. Each struct is a dtype of collectives.engine.instructions, field by field. */
#ifndef CHORUS_LAYOUT_H
#define CHORUS_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    SLOTS = 16,          /* messages under way from one rank to another */
    LINE = 128,          /* bytes from one flag to the next */
    INLINE = 56,         /* bytes that fit beside a flag */
    ADDRESSES = 3,       /* most (address, bytes) pairs in a slot */
    SHORT_SPACING = 2,   /* distance of two short buffers, in their length */
    SPREAD = 1 << 13,    /* bytes from which messages use all of a bounce buffer in turn */
    LABELS = 64,         /* labels of a mark: messages of so many bytes beside the flag, and others */
    PROBE_EVERY = 64,    /* messages between two comparisons of copies into bounce buffers */
    MOST_SEGMENTS = 32,  /* segments of a shared heap that a link knows */
    CLASS_WORDS = 2,     /* of a set of size classes */
    CALLS_KEPT = 512,       /* of a record: the last calls of a rank */
    FRAME = 512,            /* bytes of the first message of a Python object */
};

#define KIND ((int64_t)1 << 18) /* a flag is the number of its message times this, plus its label */

typedef enum {
    SEND,         /* send a message through a mailbox */
    RECV,         /* receive one, and copy it or reduce it into the operands */
    LOCAL,        /* copy or reduce memory of this rank */
    WAIT_STREAM,  /* wait until a stream has done a number of rows */
    WAIT_READ,    /* wait until the receiver has read a message sent by address */
    NET_SEND,     /* start a send by the MPI */
    NET_RECV,     /* start a receive by the MPI */
    NET_WAIT,     /* wait for the end of either */
    EXPECT_NONE,  /* fail if a message of the peer has arrived */
    CALL,         /* call a Python function, again and again while it returns False */
} Kind;

typedef struct {
    int64_t label;          /* of a message beside its flag or in a bounce buffer */
    int64_t address_label;  /* of a message sent by address, to which the number of addresses is added; 0: none is */
    int64_t nbytes;         /* of all operands */
    int64_t part;           /* bytes of the parts in which the message travels through bounce buffers; 0: in one */
    int64_t done;           /* bytes of the parts that are done in this run */
    int64_t number;         /* of the message that was sent by address; 0: nothing is to be acknowledged */
    int32_t first_operand;  /* index of the first operand */
    int32_t operands;       /* their number */
    int32_t link;           /* index of the link to the peer, of the network message, or of the function */
    int32_t after;          /* index of the stream, or of the row of a send, that is waited for */
    int32_t count;          /* rows that the stream must have done */
    int16_t reduction;      /* index of the reduction; -1: a copy */
    uint8_t kind;           /* a Kind */
    uint8_t mine_first;     /* 1 if the operand of this rank is the left one */
} Row;

typedef struct {
    int64_t nbytes;
    int64_t left_offset;   /* of the left or only operand, in its memory */
    int64_t right_offset;  /* of the right operand */
    int64_t out_offset;    /* of the result */
    int32_t left, right, out;  /* numbers of the memories */
    int32_t unused;
} Operand;

typedef struct {
    int64_t first;     /* index of the first row */
    int64_t stop;      /* index after the last row */
    int64_t position;  /* index of the next row */
} Stream;

typedef struct {
    int64_t pieces;      /* into which the elements of a call are cut */
    int64_t grain;       /* elements of which all pieces but the last are multiples, if there are enough */
    int64_t itemsize;    /* bytes of an element */
    int64_t mark;        /* of the call, without its length */
    int64_t call_bytes;  /* bytes of the call for each element */
    int64_t cell_bytes;  /* bytes of a bounce buffer */
    int64_t part;        /* bytes of the parts of long messages */
    int64_t streamed;    /* bytes of the longest message that travels in parts */
    int64_t length;      /* elements for which operands and labels are set now */
    int64_t least, most; /* elements of the shortest and the longest call */
    int64_t starts[5];   /* first chunk of source, target, scratch and landing in the order of the chunks, and the end */
    int64_t mark_bytes;  /* bytes of the mark for each element */
    int64_t blocks;      /* of all memories in a program for any counts, whose elements are bytes; else 0 */
    int64_t own[2];      /* of these, this rank's own block in source and target; -1: it is not in both */
    int64_t room;        /* bytes of scratch, and of landing memory, in a program for any counts */
} Scale;

typedef struct {
    int64_t start, end;  /* addresses in this process */
} OwnSegment;

typedef struct {
    int64_t start, end;  /* addresses in the peer's process */
    int64_t here;        /* address of the start in this process */
} PeerSegment;

typedef struct {
    int64_t sent;          /* messages sent to the peer */
    int64_t acknowledged;  /* messages that the peer is known to have read */
    int64_t received;      /* messages received from the peer */
    int64_t pid;           /* the peer's process */
    int64_t outbox;        /* address of the first flag of messages to the peer */
    int64_t inbox;         /* address of the first flag of messages from the peer */
    int64_t my_ack;        /* address of the acknowledgement that this rank writes */
    int64_t their_ack;     /* address of the acknowledgement that the peer writes */
    int64_t cell_bytes;    /* bytes of a bounce buffer */
    int64_t copied_bytes;  /* bytes up to which a message is copied into a bounce buffer */
    int64_t short_bytes;   /* bytes of a short buffer */
    int64_t short_out;     /* address of the first short buffer of messages to the peer */
    int64_t short_in;      /* the same of messages from the peer */
    int64_t cells_out;     /* address of the first bounce buffer of messages to the peer */
    int64_t cells_in;      /* the same of messages from the peer */
    int64_t my_offer;      /* address of the Offer that this rank writes */
    int64_t their_offer;   /* address of the Offer that the peer writes */
    int64_t writes;        /* 1 if ranks may write each other's memory */
    int64_t offered;       /* number of the message that this rank has offered memory for */
    int64_t taken;         /* chunks of it that this rank has copied */
    int64_t past_caches;   /* comparisons for which bounce buffers are written by non-temporal stores */
    int64_t until_probe;   /* messages until the next comparison; -1: never */
    int64_t own_segments;  /* segments of this rank that the peer has mapped */
    OwnSegment own[MOST_SEGMENTS];
    int64_t peer_segments; /* segments of the peer that this rank has mapped */
    PeerSegment theirs[MOST_SEGMENTS];
} Link;

typedef struct {
    int64_t left;     /* number of the message and chunks left, as COUNTS * number + chunks */
    _Atomic int64_t target; /* address of the receiver's memory; a sender may read these three as they change */
    _Atomic int64_t nbytes; /* of the message */
    _Atomic int64_t label;  /* that the message must have */
    int64_t written;  /* of the opposite direction: number and written chunks of the message to the same peer */
} Offer;

typedef enum {
    PLAIN,    /* an object of Python's own types, see plain.c */
    PICKLED,  /* an object */
    FAILED,   /* the text of the error in place of an object */
} Content;

typedef struct {
    int64_t length;   /* bytes of the object, of which the first follow in the frame */
    int32_t buffers;  /* arrays of the object that are sent by themselves */
    int32_t content;  /* a Content */
    char data[];
} Frame;

typedef struct {
    int64_t peer, tag;
    int64_t comm, datatype;  /* handles of the MPI */
    int64_t receives;        /* 1 for a receive */
    int64_t request;         /* handle of the MPI */
    int64_t error;           /* last error of the MPI */
    int64_t count;           /* bytes received */
    int64_t status[8];
} NetMessage;

typedef enum {
    IS_ACTIVE,  /* the call has started */
    HAS_ENDED,
    HAS_FAILED,
    WAS_LEFT,   /* before its end, by an error or Ctrl-C, or by another call of the same program */
} CallState;

/* A call in the record of a rank. */
typedef struct {
    _Atomic int64_t number;  /* of the call in this process, from 1; 0 while the entry is written */
    int64_t turn;            /* number of the call among those of its channel, from 1: the same on all ranks */
    int64_t started, ended;  /* nanoseconds of the monotonic clock */
    int64_t nbytes;
    int64_t communicator;    /* number that all its ranks know it by */
    int32_t channel;         /* of the communicator's mailboxes; -1: without */
    int32_t root;            /* -1: none */
    int32_t round, peer;     /* that the call waits for if it waits long, else -1 */
    uint8_t state;           /* a CallState */
    uint8_t form;            /* 0 blocking, 1 non-blocking, 2 persistent */
    char collective[14], algorithm[32], dtype[8], op[8];
} CallRecord;

#endif
